//! `docs/reference/limits.md`: the limits of `tally_contract::limits`.

use tally_contract::limits::GROUPS;
use tally_reference::{document, one_line, table};

pub fn reference() -> String {
    let groups = GROUPS.iter().map(|group| {
        let rows = group
            .limits
            .iter()
            .map(|limit| [format!("`{}`", limit.name), limit.to_string(), one_line(limit.text)]);
        format!("## {}\n\n{}", group.title, table(["limit", "value", "what it bounds"], rows))
    });
    document(
        "Limits",
        "The names are those of the code ([`limits.rs`](../../core/contract/src/limits.rs)). A row that names a \
         setting shows its default; the setting's range is in the [configuration](configuration.md).",
        &groups.collect::<Vec<_>>().join("\n"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_row_with_its_value() {
        let text = reference();
        assert!(
            text.contains("## What a policy asks for\n\n| limit | value | what it bounds |\n"),
            "{text}"
        );
        assert!(
            text.contains("| `SAVED_BYTES_MAX` | 256 KiB | The data that `snapshot` gives."),
            "{text}"
        );
    }
}
