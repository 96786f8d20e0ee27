//! The interpreter: code is loaded, asked about, and run one
//! block at a time.

use crate::config::COMPUTE_CAPABILITY;
use crate::error::{CuError, CuResult};
use crate::memory::MemoryMap;
use std::sync::atomic::AtomicBool;
use tally_softcuda_vm::{BlockLaunch, GlobalVar, Kernel, Module, Program, Trap, run_block};

pub(crate) use tally_softcuda_vm::Scratch;

/// PTX that cannot be loaded: the result code and what to tell the program.
#[derive(Debug)]
pub(crate) struct LoadError {
    pub(crate) code: CuError,
    pub(crate) text: String,
}

/// A module's code, placed and linked.
pub(crate) struct Code(Program);

/// Kernel names in PTX text.
pub(crate) fn kernel_names(ptx: &str) -> Result<Vec<String>, LoadError> {
    Ok(parse(ptx)?.entry_names().map(str::to_owned).collect())
}

fn parse(ptx: &str) -> Result<Module, LoadError> {
    check_target(ptx)?;
    Module::parse(ptx).map_err(invalid)
}

fn invalid(error: tally_softcuda_vm::PtxError) -> LoadError {
    LoadError { code: CuError::INVALID_PTX, text: format!("ptxas fatal   : {error}") }
}

/// Refuses PTX for a newer device than this one claims to be.
fn check_target(ptx: &str) -> Result<(), LoadError> {
    let target = ptx.lines().map(str::trim).find_map(|l| l.strip_prefix(".target"));
    let Some(target) = target else { return Ok(()) };
    let digits: String = target
        .trim_start()
        .trim_start_matches("sm_")
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    let (major, minor) = COMPUTE_CAPABILITY;
    match digits.parse::<i32>() {
        Ok(sm) if sm > major * 10 + minor => Err(LoadError {
            code: CuError::INVALID_PTX,
            text: format!("ptxas fatal   : .target sm_{sm} is newer than sm_{major}{minor}"),
        }),
        _ => Ok(()),
    }
}

impl Code {
    /// Parses and links `ptx`; `place` allocates and fills each variable.
    pub(crate) fn load(
        ptx: &str,
        place: impl FnOnce(&[GlobalVar]) -> CuResult<Vec<u64>>,
    ) -> Result<Self, LoadError> {
        let module = parse(ptx)?;
        let addresses = place(module.globals())
            .map_err(|code| LoadError { code, text: "no memory for its variables".into() })?;
        let named: std::collections::HashMap<String, u64> =
            module.globals().iter().map(|g| g.name.clone()).zip(addresses).collect();
        let program = module
            .link(&mut |global| named.get(&global.name).copied().unwrap_or(0))
            .map_err(invalid)?;
        Ok(Self(program))
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.0.kernels().map(|k| k.name.clone()).collect()
    }

    /// A kernel by name.
    pub(crate) fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.0.kernel(name)
    }

    /// Runs one block.
    ///
    /// # Errors
    /// The result code that a trap stands for.
    #[allow(clippy::too_many_arguments, reason = "what a block is given, each once")]
    pub(crate) fn run_block(
        &self,
        kernel: &Kernel,
        params: &[u8],
        (grid, block, block_index): ([u32; 3], [u32; 3], [u32; 3]),
        dynamic_shared_bytes: u32,
        (sm_id, sm_count): (u32, u32),
        memory: &MemoryMap,
        scratch: &mut Scratch,
        cancelled: &AtomicBool,
    ) -> CuResult {
        let launch = BlockLaunch {
            program: &self.0,
            kernel,
            params,
            grid,
            block,
            block_index,
            dynamic_shared_bytes,
            sm_id,
            sm_count,
        };
        run_block(&launch, memory, scratch, cancelled).map(drop).map_err(|trap| {
            let code = code_of(&trap);
            if !matches!(trap, Trap::Cancelled) {
                crate::config::log(format_args!("{trap}"));
            }
            code
        })
    }
}

/// What hardware reports for each way to fail.
fn code_of(trap: &Trap) -> CuError {
    match trap {
        Trap::IllegalAddress { .. } => CuError::ILLEGAL_ADDRESS,
        Trap::Misaligned { .. } => CuError::MISALIGNED_ADDRESS,
        Trap::Assert { .. } => CuError::ASSERT,
        Trap::IllegalInstruction { .. } => CuError::ILLEGAL_INSTRUCTION,
        Trap::Unsupported { .. } => CuError::NOT_SUPPORTED,
        Trap::BadLaunch { .. } => CuError::INVALID_VALUE,
        _ => CuError::LAUNCH_FAILED,
    }
}
