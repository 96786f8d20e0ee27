//! A policy that imports every capability: `identity`, `kernel-identity` and `high-priority`.
//!
//! The kernel id of a launch says what it does; the numbers are known to
//! `core/wasm-host/tests/common/mod.rs`. Configured with `hold` it holds everything, and with
//! `ungate` it takes a client's right to launch undecided away in `init`.

use tally_sdk::{Answer, Decision, Launch, Policy, host};

struct Nosy {
    holds: bool,
}

impl Policy for Nosy {
    fn init(config: &str) -> Result<Self, String> {
        match config {
            "" => {}
            "hold" => return Ok(Nosy { holds: true }),
            "ungate" => host::set_ungated(3, false),
            other => return Err(format!("what is {other:?}?")),
        }
        Ok(Nosy { holds: false })
    }

    fn decide(&mut self, launch: &Launch) -> Answer {
        if self.holds {
            return Decision::Hold(u64::MAX).into();
        }
        match launch.kernel {
            1 => {
                host::set_ungated(3, false);
                Decision::Run(0)
            }
            // The lengths of the names of client 1 and kernel 0, and the labels.
            2 => {
                let client = host::client_identity(1);
                let kernel = host::kernel_identity(0);
                let client =
                    client.map_or(0, |it| it.name.len() as u64 + 100 * it.labels.len() as u64);
                Decision::Hold(
                    client + kernel.map_or(0, |it| 1_000 * it.name.len() as u64 + it.image),
                )
            }
            3 => Decision::Hold(1),
            4 => Decision::Sliced(7),
            5 => Decision::SmLimited(8),
            6 => Decision::Preemptible,
            _ => Decision::Run(0),
        }
        .into()
    }
}

tally_sdk::export!(Nosy);
