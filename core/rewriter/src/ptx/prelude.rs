//! The text that is put in front of a kernel's own code.
//!
//! Names are made of a stem that does not occur in the source, so that they cannot
//! meet the program's. The protocol and the parameter are those of
//! [`control`](crate::control); what is read there at which offset is written down
//! only here.

use crate::control::FLAG_STRIDE_BYTES;
use std::collections::HashSet;

/// From this architecture on, accesses have orders and scopes.
const ORDERED_FROM: u32 = 70;

/// How the prelude touches memory that others touch too.
struct Accesses {
    load_word: &'static str,
    load_flag: &'static str,
    store_notice: &'static str,
    swap: &'static str,
}

fn accesses(target: u32) -> Accesses {
    if target >= ORDERED_FROM {
        Accesses {
            load_word: "ld.relaxed.gpu.global.u32",
            load_flag: "ld.relaxed.sys.global.u32",
            store_notice: "st.relaxed.sys.global.u32",
            swap: "atom.relaxed.gpu.global.cas.b32",
        }
    } else {
        Accesses {
            load_word: "ld.volatile.global.u32",
            load_flag: "ld.volatile.global.u32",
            store_notice: "st.volatile.global.u32",
            swap: "atom.global.cas.b32",
        }
    }
}

/// The claim-table prelude; `param` is the control block's parameter.
///
/// It has a scope of its own and leaves nothing behind. Lane 0 of each warp decides;
/// the vote spreads it and makes the warp whole again before the kernel's own code.
/// Its member mask is full: lanes that do not exist are not waited for.
pub(super) fn prelude(stem: &str, param: &str, target: u32) -> String {
    let Accesses { load_word, load_flag, store_notice, swap } = accesses(target);
    let template = format!(
        "
{{ // claim-table prelude
.reg .pred %@out, %@first, %@stop, %@claim, %@run;
.reg .b32 %@x, %@y, %@z, %@m, %@id, %@lo, %@hi, %@epoch, %@base, %@ran, %@word, %@found, %@flag, %@next, %@odd;
.reg .b64 %@table, %@at, %@flags, %@notice;
ld.param.u32 %@m, [{param}+40];
not.b32 %@m, %@m;
mov.u32 %@x, %ctaid.x;
and.b32 %@x, %@x, %@m;
ld.param.u32 %@m, [{param}+44];
not.b32 %@m, %@m;
mov.u32 %@y, %ctaid.y;
and.b32 %@y, %@y, %@m;
ld.param.u32 %@m, [{param}+48];
not.b32 %@m, %@m;
mov.u32 %@z, %ctaid.z;
and.b32 %@z, %@z, %@m;
mov.u32 %@m, %nctaid.y;
mad.lo.u32 %@id, %@z, %@m, %@y;
mov.u32 %@m, %nctaid.x;
mad.lo.u32 %@id, %@id, %@m, %@x;
ld.param.u32 %@lo, [{param}+24];
ld.param.u32 %@hi, [{param}+28];
setp.lt.u32 %@out, %@id, %@lo;
setp.ge.or.u32 %@out, %@id, %@hi, %@out;
@%@out exit;
ld.param.u64 %@table, [{param}];
setp.eq.u64 %@run, %@table, 0;
@%@run bra $@own;
ld.param.u32 %@epoch, [{param}+32];
ld.param.u32 %@base, [{param}+36];
add.u32 %@ran, %@epoch, 1;
mov.u32 %@word, %@epoch;
mov.u32 %@m, %laneid;
setp.eq.u32 %@first, %@m, 0;
@!%@first bra $@agree;
mul.wide.u32 %@at, %@id, 4;
add.u64 %@at, %@at, %@table;
{load_word} %@word, [%@at];
ld.param.u32 %@m, [{param}+52];
mov.u32 %@flag, %smid;
and.b32 %@m, %@m, %@flag;
ld.param.u64 %@flags, [{param}+8];
mad.wide.u32 %@flags, %@m, {FLAG_STRIDE_BYTES}, %@flags;
{load_flag} %@flag, [%@flags];
setp.ge.u32 %@stop, %@flag, %@epoch;
selp.b32 %@next, %@epoch, %@ran, %@stop;
$@again:
and.b32 %@odd, %@word, 1;
setp.eq.u32 %@claim, %@odd, 0;
setp.lt.and.u32 %@claim, %@word, %@epoch, %@claim;
setp.lt.or.u32 %@claim, %@word, %@base, %@claim;
@!%@claim bra $@agree;
{swap} %@found, [%@at], %@word, %@next;
setp.ne.u32 %@claim, %@found, %@word;
mov.u32 %@word, %@found;
@%@claim bra $@again;
mov.u32 %@word, %@next;
@!%@stop bra $@agree;
ld.param.u64 %@notice, [{param}+16];
setp.eq.u64 %@out, %@notice, 0;
@%@out bra $@agree;
{store_notice} [%@notice], %@epoch;
$@agree:
setp.eq.u32 %@run, %@word, %@ran;
vote.sync.any.pred %@run, %@run, 0xffffffff;
@!%@run exit;
$@own:
}}
"
    );
    named(&template, stem)
}

/// The prologue of the form by offset: registers with what the block's index and the grid's size
/// would be in the whole grid. No product is formed, so that nothing overflows where
/// the grid has fewer than 2^32 blocks; the launch layer refuses larger ones.
pub(super) fn by_offset(stem: &str, param: &str) -> String {
    let template = format!(
        "
// prologue of the form by offset
.reg .b32 %@ctaid_x, %@ctaid_y, %@ctaid_z, %@nctaid_x, %@nctaid_y, %@nctaid_z, %@zero;
mov.u32 %@ctaid_y, %ctaid.x;
ld.param.u32 %@ctaid_z, [{param}+24];
add.u32 %@ctaid_y, %@ctaid_y, %@ctaid_z;
ld.param.u32 %@nctaid_x, [{param}+40];
ld.param.u32 %@nctaid_y, [{param}+44];
ld.param.u32 %@nctaid_z, [{param}+48];
div.u32 %@zero, %@ctaid_y, %@nctaid_x;
mul.lo.u32 %@ctaid_x, %@zero, %@nctaid_x;
sub.u32 %@ctaid_x, %@ctaid_y, %@ctaid_x;
div.u32 %@ctaid_z, %@zero, %@nctaid_y;
mul.lo.u32 %@ctaid_y, %@ctaid_z, %@nctaid_y;
sub.u32 %@ctaid_y, %@zero, %@ctaid_y;
mov.u32 %@zero, 0;
"
    );
    named(&template, stem)
}

/// What stands for a read of the index in the form by offset.
pub(super) fn index(stem: &str, size: bool, axis: Option<usize>) -> String {
    let base = if size { "nctaid" } else { "ctaid" };
    let template = match axis {
        Some(axis) => format!("%@{base}_{}", ["x", "y", "z"][axis]),
        None => format!("{{%@{base}_x, %@{base}_y, %@{base}_z, %@zero}}"),
    };
    named(&template, stem)
}

/// Register and label names: `%@` and `$@` stand for the stem.
fn named(template: &str, stem: &str) -> String {
    let (register, label) = (format!("%{stem}_"), format!("${stem}_"));
    template.replace("%@", &register).replace("$@", &label)
}

/// The first stem of names that does not occur in a text: `tally` and a number.
pub(super) fn stem(source: &str) -> String {
    let mut taken = HashSet::new();
    for (at, found) in source.match_indices("tally") {
        let digits = source[at + found.len()..].bytes().take_while(u8::is_ascii_digit);
        // As many numbers are tried as there are occurrences: ten digits are enough.
        let digits: Vec<u8> = digits.take(11).collect();
        if digits.len() <= 10 {
            taken.insert(digits.iter().fold(0u64, |n, d| n * 10 + u64::from(d - b'0')));
        }
    }
    match (0..).find(|n| !taken.contains(n)) {
        Some(0) | None => "tally".into(),
        Some(free) => format!("tally{free}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stems_do_not_occur_in_the_source() {
        for (source, want) in [
            ("", "tally"),
            ("%tally_x", "tally1"),
            ("$tally1_x tally tally3", "tally2"),
            ("%tally002_x", "tally"),
            ("tally1 tally0 tally00000000002", "tally2"),
            ("tally18446744073709551615", "tally"),
        ] {
            assert_eq!(stem(source), want, "{source}");
        }
    }
}
