//! Transformed launches in real programs: slices, yielding, some of the SMs, on the software device.
//!
//! Each test is two processes. The program is this very executable, started again for one test
//! under the shim with the software device as its driver; the core is in the test's own process,
//! over real shared memory, and answers and asks as the test says.

mod bounds;
#[path = "../common/mod.rs"]
mod common;
mod demand;
mod disk_cache;
mod elsewhere;
mod ends;
mod forms;
mod governor;
mod graph_limit;
mod graph_parts;
mod graphs;
mod joins;
mod kernels;
mod legacy;
mod lingering;
mod loads;
mod losses;
mod order;
mod program;
mod queues;
mod refused;
mod threads;
mod unit_profile;
mod waiting;
mod yielding;

use common::Core;
use governor::Governor;
use program::Device;
use tally_ipc::wire::{RewriteSettings, Welcome};

/// Set in a program: which test it is of.
const ENV_PROGRAM: &str = "TALLY_REWRITE_PROGRAM";

/// A best-effort client whose kernels may be transformed.
fn welcome() -> Welcome {
    Welcome {
        rewrite: RewriteSettings {
            enabled: true,
            vendor_libraries: false,
            // Long: a test that is not about it must not see it on a busy machine.
            rescue_ms: 5_000,
            cache_mib: 0,
            reserve_sms: Vec::new(),
            puts_off_joins: true,
        },
        ..common::welcome()
    }
}

/// Run a test: `program` in a process under the shim, `core` in this one. `test` is the test
/// function, for its name.
fn both<T>(
    test: T,
    welcome: &Welcome,
    program: impl FnOnce(&mut Device),
    core: impl FnOnce(&mut Governor),
) {
    both_under(test, &[], welcome, program, core);
}

/// The same, with more in the program's environment.
fn both_under<T>(
    _test: T,
    environment: &[(&str, &str)],
    welcome: &Welcome,
    program: impl FnOnce(&mut Device),
    core: impl FnOnce(&mut Governor),
) {
    let name = std::any::type_name::<T>().split_once("::").unwrap().1;
    if std::env::var(ENV_PROGRAM).is_ok_and(|of| of == name) {
        let mut device = Device::start();
        program(&mut device);
        // Past every destructor: what a test wants to see of an end, it does itself.
        std::process::exit(0);
    }
    let listening = Core::new();
    let mut governor = Governor::start(&listening, name, environment, welcome);
    core(&mut governor);
    governor.ends_well();
}
