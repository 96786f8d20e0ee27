//! The parameters of an entry: how many there are and where the next one goes.

use crate::TransformRefusal;
use tally_ptx::{Token, parameters};

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

/// Lays out the parameters in an entry's list.
///
/// # Errors
/// [`TransformRefusal::Metadata`] for a parameter of a form that is not known, and
/// [`TransformRefusal::ParameterSpace`] for one that no kernel can have.
pub(super) fn layout(source: &str, list: &[Token]) -> Result<Layout, TransformRefusal> {
    let mut out = Layout::default();
    for parameter in parameters(source, list) {
        let parameter = parameter.map_err(|_| TransformRefusal::Metadata)?;
        let layout = parameter.layout().map_err(|_| TransformRefusal::Metadata)?;
        if parameter.space != ".param" || layout.element == ".pred" || layout.is_open {
            return Err(TransformRefusal::Metadata);
        }
        let start = u64::from(out.bytes).next_multiple_of(layout.align.into());
        let end = start.checked_add(layout.bytes).filter(|end| *end <= PARAM_BYTES_MAX.into());
        out.bytes = end.ok_or(TransformRefusal::ParameterSpace)? as u32;
        out.count += 1;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(list: &str) -> Result<(u32, u32, u32), TransformRefusal> {
        let list = format!("({list})");
        let layout = layout(&list, &tally_ptx::lex(&list).unwrap())?;
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
        use TransformRefusal::{Metadata, ParameterSpace};
        for (list, why) in [
            (".param .texref t", Metadata),
            (".reg .u32 a", Metadata),
            (".param .pred a", Metadata),
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
