//! How much of the GPU each client's launches fill, and whether another one fits beside them.

use tally_sdk::grid::scaled;
use tally_sdk::{ClientId, Launch, host};

/// The whole GPU, in permille.
const ALL: u64 = 1_000;
/// Clients whose launches are remembered; those of others count as filling the GPU.
const CLIENTS_MAX: usize = 64;
/// A wide launch counts for those after it, less by this part with each.
const FADES: u64 = 8;

/// What each client's latest launches filled, permille.
#[derive(Debug, Default)]
pub struct Room {
    fills: Vec<(ClientId, u64)>,
}

/// How much of the GPU a launch fills, permille. Of a graph the kernels are not known.
fn fill(launch: &Launch) -> u64 {
    let resident = u64::from(launch.blocks_per_sm()) * u64::from(launch.sms());
    let is_known = launch.grid_blocks > 0 && !launch.is_graph();
    if is_known { scaled(launch.grid_blocks, ALL, resident).clamp(1, ALL) } else { ALL }
}

impl Room {
    /// Whether a launch fits beside what other best-effort clients have on the GPU. Takes note of the launch.
    pub fn has(&mut self, launch: &Launch) -> bool {
        let now = fill(launch);
        let known = self.fills.iter().position(|(id, _)| *id == launch.client);
        let mine = match known {
            Some(at) => {
                let fill = &mut self.fills[at].1;
                *fill = now.max(*fill - *fill / FADES);
                *fill
            }
            None if self.fills.len() < CLIENTS_MAX => {
                self.fills.push((launch.client, now));
                now
            }
            None => ALL,
        };
        if mine >= ALL {
            return false;
        }
        let of = |id| self.fills.iter().find(|(known, _)| *known == id).map_or(ALL, |one| one.1);
        let others = host::clients().into_iter().filter(|one| {
            let is_best_effort = one.class == tally_sdk::PriorityClass::BestEffort;
            is_best_effort && one.id != launch.client && one.in_flight > 0
        });
        others.map(|one| of(one.id)).fold(mine, u64::saturating_add) <= ALL
    }

    /// Forgets a client that is gone.
    pub fn left(&mut self, client: ClientId) {
        self.fills.retain(|(id, _)| *id != client);
    }
}
