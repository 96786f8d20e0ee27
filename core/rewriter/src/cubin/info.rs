//! `.nv.info`: attributes of kernels, each a format, a number and a value.

use super::elf::u16_at;
use crate::TransformRefusal;

/// Numbers of attributes (`EIATTR_…`) that the patch reads or changes.
pub(super) mod attribute {
    pub const CTAID_Z_USED: u8 = 0x04;
    pub const PARAMETER_BANK: u8 = 0x0a;
    pub const PARAMETER: u8 = 0x17;
    pub const PARAMETER_BYTES: u8 = 0x19;
    pub const EXIT_OFFSETS: u8 = 0x1c;
    pub const CONVERGENCE_STACK: u8 = 0x1e;
    pub const NEEDS_LAUNCH_WRAPPER: u8 = 0x1f;
    pub const NEEDS_LAUNCH_PATCH: u8 = 0x20;
    pub const VOTE_OFFSETS: u8 = 0x28;
    pub const VOTE_MASKS: u8 = 0x29;
    pub const REGISTERS: u8 = 0x2f;
    pub const API_VERSION: u8 = 0x37;
    pub const CLUSTER: u8 = 0x3d;
}

/// Attributes of a kernel that stay right, as they are, when code is appended and one
/// parameter more is passed: limits, sizes, and offsets of instructions, none of
/// which moves. By their `EIATTR_` names, with their formats' numbers.
const UNAFFECTED: &[(u8, &str)] = &[
    (0x01, "PAD"),
    (0x04, "CTAIDZ_USED"),
    (0x05, "MAX_THREADS"),
    (0x0f, "EXTERNS"),
    (0x10, "REQNTID"),
    (0x11, "FRAME_SIZE"),
    (0x12, "MIN_STACK_SIZE"),
    (0x1b, "MAXREG_COUNT"),
    (0x1e, "CRS_STACK_SIZE"),
    (0x21, "EXPLICIT_CACHING"),
    (0x22, "ISTYPEP_USED"),
    (0x23, "MAX_STACK_SIZE"),
    (0x24, "SUQ_USED"),
    (0x25, "LD_CACHEMOD_INSTR_OFFSETS"),
    (0x26, "LOAD_CACHE_REQUEST"),
    (0x27, "ATOM_SYS_INSTR_OFFSETS"),
    (0x2a, "SW1850030_WAR"),
    (0x2b, "WMMA_USED"),
    (0x2d, "ATOMF16_EMUL_INSTR_OFFSETS"),
    (0x2f, "REGCOUNT"),
    (0x30, "SW2393858_WAR"),
    (0x31, "INT_WARP_WIDE_INSTR_OFFSETS"),
    (0x32, "SHARED_SCRATCH"),
    (0x34, "INDIRECT_BRANCH_TARGETS"),
    (0x35, "SW2861232_WAR"),
    (0x36, "SW_WAR"),
    (0x37, "CUDA_API_VERSION"),
    (0x38, "NUM_MBARRIERS"),
    (0x39, "MBARRIER_INSTR_OFFSETS"),
    (0x3d, "CTA_PER_CLUSTER"),
    (0x3e, "EXPLICIT_CLUSTER"),
    (0x3f, "MAX_CLUSTER_RANK"),
    (0x41, "RESERVED_SMEM_USED"),
    (0x42, "RESERVED_SMEM_0_SIZE"),
    (0x44, "UNUSED_LOAD_BYTE_OFFSET"),
    (0x46, "SYSCALL_OFFSETS"),
    (0x47, "SW_WAR_MEMBAR_SYS_INSTR_OFFSETS"),
    (0x4c, "NUM_BARRIERS"),
    (0x50, "SPARSE_MMA_MASK"),
    (0x54, "REG_RECONFIG"),
    (0x5f, "as CUDA 13 writes it for every kernel"),
];

/// An attribute's value, by where it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// In the attribute itself: formats 1 (none), 2 (a byte) and 3 (two).
    Short { format: u8, value: u16 },
    /// Bytes that follow: format 4.
    Bytes(Vec<u8>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attribute {
    pub number: u8,
    pub value: Value,
}

impl Attribute {
    pub fn bytes(number: u8, bytes: impl Into<Vec<u8>>) -> Self {
        Attribute { number, value: Value::Bytes(bytes.into()) }
    }

    pub fn short(number: u8, format: u8, value: u16) -> Self {
        Attribute { number, value: Value::Short { format, value } }
    }

    /// Whether it stays right in a patched kernel without a change.
    pub fn unaffected(&self) -> bool {
        UNAFFECTED.iter().any(|(number, _)| *number == self.number)
    }

    /// Its bytes, if it has `expected` of them.
    pub fn exactly(&self, expected: usize) -> Result<&[u8], TransformRefusal> {
        match &self.value {
            Value::Bytes(bytes) if bytes.len() == expected => Ok(bytes),
            _ => Err(TransformRefusal::Metadata),
        }
    }
}

/// A section of attributes, in order.
///
/// # Errors
/// [`TransformRefusal::Malformed`].
pub(super) fn read(mut data: &[u8]) -> Result<Vec<Attribute>, TransformRefusal> {
    let mut found = Vec::new();
    while !data.is_empty() {
        let (head, rest) = data.split_at_checked(4).ok_or(TransformRefusal::Malformed)?;
        let (format, number, value) = (head[0], head[1], u16_at(head, 2));
        data = rest;
        let value = match format {
            1..=3 => Value::Short { format, value },
            4 => {
                let (bytes, rest) =
                    data.split_at_checked(value.into()).ok_or(TransformRefusal::Malformed)?;
                data = rest;
                Value::Bytes(bytes.to_vec())
            }
            _ => return Err(TransformRefusal::Malformed),
        };
        found.push(Attribute { number, value });
    }
    Ok(found)
}

/// As a section; `None` if a value is too long for its length field.
pub(super) fn write(attributes: &[Attribute]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    for attribute in attributes {
        let (format, value, bytes) = match &attribute.value {
            Value::Short { format, value } => (*format, *value, &[][..]),
            Value::Bytes(bytes) => (4, u16::try_from(bytes.len()).ok()?, bytes.as_slice()),
        };
        out.extend([format, attribute.number]);
        out.extend(value.to_le_bytes());
        out.extend(bytes);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_written() {
        let data = [4, 0x37, 4, 0, 0x82, 0, 0, 0, 3, 0x19, 12, 0, 1, 4, 0, 0, 2, 0x4c, 1, 0];
        let read = read(&data).unwrap();
        assert_eq!(read.len(), 4);
        assert_eq!(write(&read).unwrap(), data);
    }

    #[test]
    fn no_attribute_ends_early() {
        assert_eq!(read(&[4, 0x37, 4, 0, 0x82]), Err(TransformRefusal::Malformed));
        assert_eq!(read(&[4, 0x37, 4]), Err(TransformRefusal::Malformed));
        assert_eq!(read(&[9, 0x37, 4, 0]), Err(TransformRefusal::Malformed));
    }

    #[test]
    fn the_unaffected_are_sorted_and_hold_none_that_is_changed_by_force() {
        assert!(UNAFFECTED.is_sorted_by(|a, b| a.0 < b.0));
        let changed = [0x0a, 0x17, 0x19, 0x1c, 0x28, 0x29];
        assert!(UNAFFECTED.iter().all(|(number, _)| !changed.contains(number)));
    }
}
