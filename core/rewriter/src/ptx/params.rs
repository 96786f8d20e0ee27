//! The parameters of an entry: how many there are and where the next one goes.

use super::lex::{Kind, Token, integer};
use crate::Refusal;

/// Bytes of parameters that a kernel may have before PTX 8.1.
pub const PARAM_BYTES_MAX_OLD: u32 = 4096;
/// From PTX 8.1, on sm_70 and later.
pub const PARAM_BYTES_MAX: u32 = 32_764;

/// What a parameter list comes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Layout {
    pub count: u32,
    /// One more than the last byte of the last parameter.
    pub bytes: u32,
}

impl Layout {
    /// Where an 8-byte aligned parameter after the last one lies.
    pub fn next_aligned(&self) -> u32 {
        self.bytes.next_multiple_of(8)
    }
}

/// Lays out the tokens between an entry's parentheses.
///
/// # Errors
/// [`Refusal::Metadata`] for a parameter of a form that is not known, and
/// [`Refusal::ParameterSpace`] for one that no kernel can have.
pub(super) fn layout(source: &str, tokens: &[Token]) -> Result<Layout, Refusal> {
    let mut out = Layout::default();
    if tokens.is_empty() {
        return Ok(out);
    }
    for param in tokens.split(|t| t.is(b',')) {
        let (size, align) = parameter(source, param)?;
        let start = u64::from(out.bytes).next_multiple_of(align);
        let end = start.checked_add(size).filter(|end| *end <= u64::from(PARAM_BYTES_MAX));
        out.bytes = end.ok_or(Refusal::ParameterSpace)? as u32;
        out.count += 1;
    }
    Ok(out)
}

/// Size and alignment of `.param .align 8 .b8 name[48]` and its like.
fn parameter(source: &str, tokens: &[Token]) -> Result<(u64, u64), Refusal> {
    let text = |i: usize| tokens.get(i).map_or("", |t: &Token| t.text(source));
    if text(0) != ".param" {
        return Err(Refusal::Metadata);
    }
    let (mut at, mut unit, mut lanes, mut align, mut pointer) = (1, None, 1, None, false);
    while let Some(token) = tokens.get(at).filter(|t| t.kind == Kind::Dot) {
        at += 1;
        match token.text(source) {
            ".align" => {
                let value = integer(text(at)).filter(|n| n.is_power_of_two() && *n <= 1 << 16);
                let value = value.ok_or(Refusal::Metadata)?;
                at += 1;
                // After `.ptr` it is the alignment of what is pointed to.
                if !pointer {
                    align = Some(value);
                }
            }
            ".ptr" => pointer = true,
            ".global" | ".const" | ".shared" | ".local" if pointer => {}
            ".v2" => lanes = 2,
            ".v4" => lanes = 4,
            other => unit = Some(type_bytes(other).ok_or(Refusal::Metadata)?),
        }
    }
    let unit = unit.ok_or(Refusal::Metadata)? * lanes;
    if tokens.get(at).is_none_or(|t| t.kind != Kind::Word) {
        return Err(Refusal::Metadata);
    }
    let mut size = unit;
    let mut rest = &tokens[at + 1..];
    while let [open, count, close, more @ ..] = rest {
        let count = integer(count.text(source)).filter(|_| open.is(b'[') && close.is(b']'));
        let count = count.ok_or(Refusal::Metadata)?;
        size = size.checked_mul(count).ok_or(Refusal::ParameterSpace)?;
        rest = more;
    }
    if !rest.is_empty() {
        return Err(Refusal::Metadata);
    }
    Ok((size, align.unwrap_or(unit)))
}

fn type_bytes(dot: &str) -> Option<u64> {
    Some(match dot {
        ".b8" | ".u8" | ".s8" => 1,
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => 2,
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => 4,
        ".b64" | ".u64" | ".s64" | ".f64" => 8,
        ".b128" => 16,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::lex::tokens;
    use super::*;

    fn of(list: &str) -> Result<(u32, u32, u32), Refusal> {
        let layout = layout(list, &tokens(list).unwrap())?;
        Ok((layout.count, layout.bytes, layout.next_aligned()))
    }

    #[test]
    fn parameters_are_laid_out_as_the_driver_lays_them_out() {
        for (list, want) in [
            ("", (0, 0, 0)),
            (".param .u64 a", (1, 8, 8)),
            (".param .u64 a, .param .u32 b", (2, 12, 16)),
            (".param .u8 a, .param .f64 b, .param .u16 c", (3, 18, 24)),
            (".param .align 8 .b8 a[48], .param .u32 b", (2, 52, 56)),
            (".param .u32 a, .param .align 64 .b8 map[128]", (2, 192, 192)),
            (".param .u64 .ptr .global .align 256 a, .param .b8 c", (2, 9, 16)),
            (".param .u64 .ptr .align 1 a", (1, 8, 8)),
            (".param .u32 a, .param .align 4 .b8 s[0x6]", (2, 10, 16)),
            (".param .u32 a, .param .u32 b[2][3]", (2, 28, 32)),
        ] {
            assert_eq!(of(list), Ok(want), "{list}");
        }
    }

    #[test]
    fn parameters_of_unknown_form_are_refused() {
        use Refusal::{Metadata, ParameterSpace};
        for (list, why) in [
            (".param .texref t", Metadata),
            (".reg .u32 a", Metadata),
            (".param .u32", Metadata),
            (".param .u32 a[]", Metadata),
            (".param .u32 a[4", Metadata),
            (".param .align 3 .b8 a[3]", Metadata),
            (".param .u32 a,", Metadata),
            (".param .b8 a[40000]", ParameterSpace),
            (".param .b8 a[0xffffffffffffffff][2]", ParameterSpace),
            (".param .u64 a[0xffffffffffffffff]", ParameterSpace),
        ] {
            assert_eq!(of(list), Err(why), "{list}");
        }
    }
}
