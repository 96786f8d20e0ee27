//! The prelude's machine code, and placing it.
//!
//! `templates/bake.py` compiles `templates/prelude.ptx` and proves what is relied on
//! here: the code can be moved as it is, and the control block's place among the
//! parameters only shows in the constant offsets of the instructions in `fixups`.

use super::sass::{self, CONTROL_SHIFT, INSTRUCTION_BYTES, WORD_SHIFT};
use super::templates::TEMPLATES;

/// The control block's offset among the parameters, at most: as far as `bake.py` proved.
pub(super) const CONTROL_OFFSET_MAX: u32 = 4040;

/// Registers that a prelude needs, at most. They are given out by eights, so that no
/// kernel loses occupancy.
pub(super) const REGISTERS_MAX: u32 = 16;

/// The prelude for one architecture. Offsets count from the body's first byte.
pub(super) struct Template {
    pub arch: u32,
    /// First instructions of kernels that are displaced: the stack pointer's set-up,
    /// without its scheduling.
    pub first: &'static [u128],
    pub body: &'static [u128],
    /// Index of the instruction in whose place the kernel's own code follows.
    pub marker: usize,
    /// Indices of instructions with the control block's offset in them.
    pub fixups: &'static [usize],
    pub exits: &'static [u32],
    /// Offsets of the prelude's votes and the like (`EIATTR_COOP_GROUP_INSTR_OFFSETS`).
    pub votes: &'static [u32],
    /// Kernels of this architecture declare that they read `%ctaid.z`.
    pub ctaid_z: bool,
    /// The prelude has a convergence barrier.
    pub convergence: bool,
    /// Registers that the prelude needs.
    pub registers: u32,
    /// Offset of the parameters in constant bank 0, bytes.
    pub parameter_base: u32,
    /// Words of bank 0 that only a kernel that synchronises its grid reads (`%envreg1` and 2).
    pub grid_words: &'static [u32],
    /// Words of bank 0 that are others in each launch of a form (`%gridid`, `%current_graph_exec`).
    pub launch_words: &'static [u32],
    /// Words of bank 0 with the address that user constants have as ordinary memory.
    pub constant_words: &'static [u32],
}

impl Template {
    /// For an architecture, if there is one.
    pub fn of(arch: u32) -> Option<&'static Self> {
        TEMPLATES.iter().find(|t| t.arch == arch)
    }

    /// Whether a kernel may start with this instruction.
    pub fn displaces(&self, instruction: u128) -> bool {
        self.first.contains(&(instruction & ((1 << CONTROL_SHIFT) - 1)))
    }

    /// What is appended at byte offset `base` of a kernel's code: the prelude for a
    /// control block at `control_offset`, the displaced instruction, the way back, and
    /// padding up to a multiple of `align`.
    pub fn tail(&self, base: usize, control_offset: u32, first: u128, align: usize) -> Vec<u8> {
        let mut code = self.body.to_vec();
        for index in self.fixups {
            code[*index] += u128::from(control_offset) << WORD_SHIFT;
        }
        let at = |index: usize| base + index * INSTRUCTION_BYTES;
        code[self.marker] = sass::branch(self.arch, at(self.marker), at(code.len()));
        // What the prelude still has under way may write registers, or read them.
        code.push(sass::wait_for_all());
        code.push(first);
        code.push(sass::branch(self.arch, at(code.len()), INSTRUCTION_BYTES));
        // As behind every function: nothing runs on from here.
        code.push(sass::branch(self.arch, at(code.len()), at(code.len())));
        while !at(code.len()).is_multiple_of(align) {
            code.push(sass::nop());
        }
        code.iter().flat_map(|instruction| instruction.to_le_bytes()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second look at what `bake.py` proves, without `ptxas`.
    #[test]
    fn the_table_holds_what_is_relied_on() {
        assert!(TEMPLATES.is_sorted_by(|a, b| a.arch < b.arch));
        for t in &TEMPLATES {
            let bytes = t.body.len() * INSTRUCTION_BYTES;
            assert!(!t.first.is_empty() && t.first.iter().all(|x| x >> CONTROL_SHIFT == 0));
            assert!(t.marker < t.body.len() && !t.fixups.contains(&t.marker));
            // The marker, a `NANOSLEEP 0x1234`, is there once.
            let marker = |x: u128| x & 0xfff == 0x95d && x >> 32 & 0xffff_ffff == 0x1234;
            let markers: Vec<_> = (0..t.body.len()).filter(|i| marker(t.body[*i])).collect();
            assert_eq!(markers, [t.marker]);
            for offset in t.exits {
                let index = *offset as usize / INSTRUCTION_BYTES;
                assert_eq!(t.body[index] & 0xfff, 0x94d, "sm_{}: exit at {offset}", t.arch);
            }
            assert!(t.exits.is_sorted() && t.votes.is_sorted() && !t.votes.is_empty());
            assert!(t.votes.iter().all(|offset| (*offset as usize) < bytes));
            for (index, instruction) in t.body.iter().enumerate() {
                let at = index * INSTRUCTION_BYTES;
                if let Some(to) = sass::jump_target(t.arch, *instruction, at) {
                    assert!((0..bytes as i64).contains(&to), "sm_{}: {at} goes to {to}", t.arch);
                }
                // Constants of the control block are fixed up, and nothing else is.
                let constant = sass::constant(*instruction);
                let of_block = sass::has_constant(*instruction)
                    && constant.bank == 0
                    && constant.offset >= t.parameter_base;
                assert_eq!(of_block, t.fixups.contains(&index), "sm_{}: {index}", t.arch);
                if of_block {
                    assert!(constant.offset < t.parameter_base + crate::control::CONTROL_BYTES);
                    assert!(constant.offset + CONTROL_OFFSET_MAX < 1 << 16);
                }
            }
            assert!(t.registers <= REGISTERS_MAX);
        }
    }

    #[test]
    fn no_tail_starts_like_a_kernel() {
        for t in &TEMPLATES {
            let first = t.first[0];
            let tail = t.tail(256, 24, first, 128);
            assert_eq!((256 + tail.len()) % 128, 0);
            let code: Vec<_> = sass::instructions(&tail).collect();
            let own = t.body.len();
            assert_eq!(code[own + 1], first);
            let back = 256 + (own + 2) * INSTRUCTION_BYTES;
            assert_eq!(sass::jump_target(t.arch, code[own + 2], back), Some(16));
            let marker = 256 + t.marker * INSTRUCTION_BYTES;
            let to = sass::jump_target(t.arch, code[t.marker], marker);
            assert_eq!(to, Some((256 + own * INSTRUCTION_BYTES) as i64));
            assert!(!t.displaces(sass::branch(t.arch, 0, 256)));
        }
    }
}
