//! Reference documents as Markdown, from what the programs themselves are made of: command lines, the schema of a
//! configuration, tables. `cargo xtask references` writes them to `docs/reference`.
#![forbid(unsafe_code)]

pub mod cli;
pub mod settings;

/// A document with its title and a note that a program made it, which exempts it from the checks of prose.
pub fn document(title: &str, introduction: &str, body: &str) -> String {
    format!(
        "# {title}\n\n<!-- Made by `cargo xtask references`; do not edit. -->\n\n{introduction}\n\n{}\n",
        body.trim()
    )
}

/// A table. Cells may hold code spans; line breaks and bars do not end a cell.
pub fn table<const N: usize>(
    head: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let cell = |cell: &String| if cell.is_empty() { " |".into() } else { format!(" {cell} |") };
    let line = |cells: &[String; N]| format!("|{}\n", cells.each_ref().map(cell).concat());
    let mut out = line(&head.map(str::to_owned));
    out += &line(&[(); N].map(|()| "---".to_owned()));
    for row in rows {
        out += &line(&row.map(|cell| one_line(&cell).replace('|', "\\|")));
    }
    out
}

/// Text of a doc comment in one line.
pub fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Plain text as Markdown shows it: outside of code spans `<` begins no tag and `*` no emphasis.
pub fn escaped(text: &str) -> String {
    let parts = text.split('`').enumerate().map(|(at, part)| match at % 2 {
        0 => part.replace('<', "\\<").replace('*', "\\*"),
        _ => part.to_owned(),
    });
    parts.collect::<Vec<_>>().join("`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_keep_to_their_line_and_column() {
        let made =
            table(["a", "b"], [["x | y".into(), "two\n  lines".into()], ["".into(), "1".into()]]);
        assert_eq!(made, "| a | b |\n| --- | --- |\n| x \\| y | two lines |\n| | 1 |\n");
    }

    #[test]
    fn text_is_no_markup_except_for_code() {
        assert_eq!(escaped("<FILE> or `<FILE>` *"), "\\<FILE> or `<FILE>` \\*");
    }

    #[test]
    fn a_document_says_what_made_it() {
        let made = document("A", "About.", "\n\nText\n");
        assert!(made.starts_with("# A\n\n<!-- Made ") && made.ends_with("-->\n\nAbout.\n\nText\n"));
    }
}
