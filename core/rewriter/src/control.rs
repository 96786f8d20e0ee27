//! The control block: what a transformed launch tells its kernel, in one extra parameter.
//!
//! A kernel in a transformed form has its own code, unchanged, behind a short prelude, and
//! one more by-value parameter of [`CONTROL_BYTES`] bytes, last in its list. The
//! launch layer fills it; machine code made from PTX and patched machine code read
//! the same block.
//!
//! # The claim protocol
//!
//! The table holds a word for each block (for each cluster, at the index of its
//! first block). An epoch is twice a counter that rises with every launch of any
//! kernel that shares the table. `RUN = epoch2 + 1`, `SKIP = epoch2`. Words below
//! `base2`, the first epoch of this instance of the kernel, count as untouched, so
//! that the table is never cleared. Lane 0 of every warp of a block:
//!
//! ```text
//! v = table[block]; stop = *flag >= epoch2
//! v == RUN                    run: another warp of this block claimed it in this launch
//! v odd  and v >= base2       exit: it ran in another launch
//! v even and v >= SKIP        exit: skipped in this launch, or a later one is at work
//! else CAS(table[block], v, stop ? SKIP : RUN); if it fails, again with the word found
//! ```
//!
//! so that all warps of a block agree, whatever the flag does meanwhile, and a block
//! runs at most once over all launches of the instance, also when two overlap.
//! `tests/claim_model.rs` shows it by trying every interleaving.

/// Bytes of the control block in a kernel's parameters; 8-byte aligned.
pub const CONTROL_BYTES: u32 = 56;

/// Offset of [`ControlBlock::lo`] in the control block, bytes.
pub const LO_OFFSET: u32 = 24;

/// Offset of [`ControlBlock::dims`] in the control block, bytes.
pub const DIMS_OFFSET: u32 = 40;

/// A flag of this value stops every launch that looks at it; 0 stops none.
pub const FLAG_RAISED: u32 = u32::MAX;

/// Distance of two of the flag's words: each on a cache line of its own.
pub const FLAG_STRIDE_BYTES: u32 = 128;

/// The extra parameter. Which fields are read depends on the form, see
/// [`ControlBlock::preemptible`], [`ControlBlock::slice`] and [`ControlBlock::by_offset`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControlBlock {
    /// Device address of the claim words; 0: nothing is claimed, only `lo..hi` counts.
    pub table: u64,
    /// Device address of the yield flag: `flag_mask + 1` words [`FLAG_STRIDE_BYTES`] apart, of which an SM reads
    /// number `%smid & flag_mask`.
    pub flag: u64,
    /// Device address of a word that gets `epoch2` when a block is skipped because of the flag; 0: none.
    pub notice: u64,
    /// First linear block id that belongs to this launch.
    pub lo: u32,
    /// One more than the last linear block id of this launch.
    pub hi: u32,
    /// Twice this launch's epoch.
    pub epoch2: u32,
    /// Twice the first epoch of this instance of the kernel.
    pub base2: u32,
    /// By claims: cluster dimensions less one (powers of two less one; 0 without
    /// clusters). By offset: the grid's own dimensions in blocks.
    pub dims: [u32; 3],
    /// See [`ControlBlock::flag`]; a power of two less one.
    pub flag_mask: u32,
}

const _: () = {
    assert!(size_of::<ControlBlock>() == CONTROL_BYTES as usize);
    assert!(std::mem::offset_of!(ControlBlock, lo) == LO_OFFSET as usize);
    assert!(std::mem::offset_of!(ControlBlock, dims) == DIMS_OFFSET as usize);
};

impl ControlBlock {
    /// Run blocks `lo..hi` of the whole grid (form by claims), claiming nothing.
    pub fn slice(lo: u32, hi: u32, cluster: [u32; 3]) -> Self {
        ControlBlock { lo, hi, dims: cluster.map(|d| d - 1), ..Default::default() }
    }

    /// Run a one-dimensional launch of some blocks as blocks `lo..` of a grid of `grid` blocks (form by offset).
    pub fn by_offset(lo: u32, grid: [u32; 3]) -> Self {
        ControlBlock { lo, hi: u32::MAX, dims: grid, ..Default::default() }
    }

    /// Run what is unclaimed, unless the flag is raised (form by claims).
    #[allow(clippy::too_many_arguments)]
    pub fn preemptible(
        table: u64,
        flag: u64,
        flag_mask: u32,
        notice: u64,
        epoch2: u32,
        base2: u32,
        cluster: [u32; 3],
    ) -> Self {
        ControlBlock {
            table,
            flag,
            notice,
            lo: 0,
            hi: u32::MAX,
            epoch2,
            base2,
            dims: cluster.map(|d| d - 1),
            flag_mask,
        }
    }

    /// The block as the bytes of a kernel parameter.
    pub fn bytes(&self) -> [u8; CONTROL_BYTES as usize] {
        let mut bytes = [0; CONTROL_BYTES as usize];
        let longs = [self.table, self.flag, self.notice];
        for (at, value) in longs.iter().enumerate() {
            bytes[at * 8..at * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        let [x, y, z] = self.dims;
        let words = [self.lo, self.hi, self.epoch2, self.base2, x, y, z, self.flag_mask];
        for (at, value) in words.iter().enumerate() {
            bytes[24 + at * 4..28 + at * 4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_lies_in_memory_as_the_prelude_reads_it() {
        let block = ControlBlock::preemptible(1, 2, 15, 3, 8, 4, [4, 2, 1]);
        let bytes = block.bytes();
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let words: Vec<_> = (0..14).map(|i| word(i * 4)).collect();
        assert_eq!(words, [1, 0, 2, 0, 3, 0, 0, u32::MAX, 8, 4, 3, 1, 0, 15]);
    }
}
