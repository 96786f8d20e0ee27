//! What a device must hold at one time.

use super::moments::{Item, Moments};
use crate::program::{Kernel, Work};

/// Blocks that may spin at one time fit, and graphs have no kernels that need fresh memory each
/// time.
///
/// # Errors
/// What does not fit.
pub fn fits(all: &Moments<'_>) -> Result<(), String> {
    let sms = all.device.sms;
    let spinners: Vec<&Item> = all.items.iter().filter(|i| i.spinning > 0).collect();
    for a in &spinners {
        let beside = |b: &&&Item| {
            !std::ptr::eq(*a, **b)
                && !all.order.before(a.end, b.start)
                && !all.order.before(b.end, a.start)
        };
        let others: u32 = spinners.iter().filter(beside).map(|b| b.spinning).sum();
        let one_wave = others == 0 && a.spinning <= all.device.wave.max(sms);
        if !one_wave && a.spinning + others >= sms {
            return Err(format!(
                "{} blocks may spin at one time on {sms} SMs",
                a.spinning + others
            ));
        }
    }
    for graph in &all.program.graphs {
        for node in &graph.nodes {
            let once = matches!(
                node.work,
                Work::Kernel {
                    kernel: Kernel::Window { .. }
                        | Kernel::LookBack { .. }
                        | Kernel::LastBlock { .. }
                        | Kernel::EachSm { .. }
                        | Kernel::Barrier { .. },
                    ..
                }
            );
            if once {
                return Err(format!("a graph runs this more than once: {}", node.work));
            }
        }
    }
    Ok(())
}
