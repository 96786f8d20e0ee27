//! Beside high-priority clients, one client's long launch at a time.
//!
//! A launch starts that is longer than its client's window, if its client has nothing else under way. Were those of
//! several clients under way at once, high-priority work would wait for all of them. It counts as long in whichever
//! form it runs. What waited goes before the next one of the client for which it waited.
//!
//! Programs may wait for one another, also by way of another GPU: then a long launch does not end while another one is
//! held for it, and the time is lost. If more than half of the time held was lost, nothing is held for some time.

use crate::saved::{numbers, put_line};
use crate::{DRAIN, LONGEST_NS_MAX, MOMENT_NS};
use tally_sdk::{ClientId, Decision, Launch, UNKNOWN, host};

/// A launch is waited for so many times as long as predicted: on some SMs, or beside a service, it takes longer.
const TIMES: u64 = 2 * DRAIN;
/// Launches that were waited for in vain before the time is judged.
const IN_VAIN: u32 = 4;
/// What was held counts half from then on.
const JUDGED_NS: u64 = 1_000_000_000;
/// Nothing is held for so long, and for twice as long the next time, so often.
const OFF_NS: u64 = 1_000_000_000;
const DOUBLINGS_MAX: u32 = 6;
/// What a saved state says of time that was held is believed up to this.
const RESTORED_NS_MAX: u64 = 64 * JUDGED_NS;
/// First word of the line that is saved.
const LONG: &str = "long";

/// The first launch that is held for the one under way.
#[derive(Clone, Copy, Debug)]
struct Held {
    client: ClientId,
    from_ns: u64,
    /// What it was held for has ended, and the same client's next one waits for it until then.
    next_until_ns: Option<u64>,
}

/// The long launch that may be under way.
#[derive(Clone, Debug, Default)]
pub(crate) struct LongLaunch {
    of: Option<ClientId>,
    /// By then it has ended, or takes far longer than predicted.
    until_ns: u64,
    held: Option<Held>,
    /// Time that was held of late, and of that in vain.
    held_ns: u64,
    lost_ns: u64,
    in_vain: u32,
    off_until_ns: u64,
    off_times: u32,
}

impl LongLaunch {
    /// A launch is about to start. `None`: it may, or the decision by which it waits for another client's long one.
    /// Longer than `window_ns` is long, and another client has no long one under way if it has no more there than its
    /// own window. One that `goes_first` waits for none, and others wait for it.
    pub(crate) fn hold(
        &mut self,
        launch: &Launch,
        window_ns: u64,
        window_of: impl FnOnce(ClientId) -> u64,
        goes_first: bool,
    ) -> Option<Decision> {
        let (now_ns, me) = (launch.now_ns, launch.client);
        let is_long = launch.predicted_ns != UNKNOWN && launch.predicted_ns > window_ns;
        if !is_long || now_ns < self.off_until_ns {
            return None;
        }
        if let Some(other) = self.of.filter(|of| *of != me) {
            let window_ns = window_of(other);
            let has_ended = host::client(other).is_none_or(|one| one.in_flight_ns <= window_ns);
            if !goes_first && !has_ended && now_ns < self.until_ns {
                self.held.get_or_insert(Held { client: me, from_ns: now_ns, next_until_ns: None });
                return Some(Decision::HoldUntilCompletion(MOMENT_NS));
            }
            if !goes_first {
                self.judge(now_ns, !has_ended);
            }
        } else if let Some(held) =
            self.held.as_mut().filter(|held| !goes_first && held.client != me)
        {
            if launch.in_flight_ns > window_ns {
                // Of its own, which may not end, another one is waited for already.
                return None;
            }
            // The other one goes next, but is not waited for if it does not come at once.
            let until_ns = *held.next_until_ns.get_or_insert(now_ns.saturating_add(MOMENT_NS));
            if now_ns < until_ns {
                return Some(Decision::HoldUntilCompletion(until_ns - now_ns));
            }
            self.judge(now_ns, false);
        }
        if self.held.is_some_and(|held| held.client == me) {
            // It goes for the sake of its floor, or went as no long one.
            self.judge(now_ns, false);
        }
        let lasts_ns = launch.in_flight_ns.saturating_add(launch.predicted_ns);
        self.of = Some(me);
        self.until_ns = now_ns.saturating_add(lasts_ns.saturating_mul(TIMES));
        None
    }

    /// A launch is held no longer.
    fn judge(&mut self, now_ns: u64, is_in_vain: bool) {
        let Some(held) = self.held.take() else { return };
        let ns = now_ns.saturating_sub(held.from_ns).min(JUDGED_NS);
        self.held_ns = self.held_ns.saturating_add(ns);
        if is_in_vain {
            self.lost_ns = self.lost_ns.saturating_add(ns);
            self.in_vain += 1;
        }
        if self.in_vain >= IN_VAIN && self.lost_ns > self.held_ns / 2 {
            self.off_until_ns = now_ns.saturating_add(OFF_NS << self.off_times);
            self.off_times = (self.off_times + 1).min(DOUBLINGS_MAX);
            (self.held_ns, self.lost_ns, self.in_vain) = (0, 0, 0);
        } else if self.held_ns > JUDGED_NS {
            (self.held_ns, self.lost_ns) = (self.held_ns / 2, self.lost_ns / 2);
            self.off_times = self.off_times.saturating_sub(1);
        }
    }

    /// A line of numbers; nothing if there was no long launch.
    pub(crate) fn saved(&self) -> String {
        let mut line = String::new();
        if let Some(of) = self.of {
            let numbers = [
                of.into(),
                self.until_ns,
                self.held.map_or(u64::MAX, |held| held.client.into()),
                self.held.map_or(0, |held| held.from_ns),
                self.held.and_then(|held| held.next_until_ns).unwrap_or(u64::MAX),
                self.held_ns,
                self.lost_ns,
                self.in_vain.into(),
                self.off_until_ns,
                self.off_times.into(),
            ];
            put_line(&mut line, LONG, numbers);
        }
        line
    }

    /// From such a line, among others. Any policy may have written it: [`Self::bound`].
    pub(crate) fn read(lines: &str) -> Self {
        let read = |line| {
            let [of, until_ns, held, from_ns, next_until_ns, numbers @ ..]: [u64; 10] =
                numbers(line, LONG)?;
            let [held_ns, lost_ns, in_vain, off_until_ns, off_times] = numbers;
            let next_until_ns = Some(next_until_ns).filter(|ns| *ns != u64::MAX);
            let was_held = |client| Held { client, from_ns, next_until_ns };
            Some(LongLaunch {
                of: Some(ClientId::try_from(of).ok()?),
                until_ns,
                held: ClientId::try_from(held).ok().map(was_held),
                held_ns: held_ns.min(RESTORED_NS_MAX),
                lost_ns: lost_ns.min(RESTORED_NS_MAX),
                in_vain: in_vain.min(IN_VAIN.into()) as u32,
                off_until_ns,
                off_times: off_times.min(DOUBLINGS_MAX.into()) as u32,
            })
        };
        lines.lines().find_map(read).unwrap_or_default()
    }

    /// What was read is believed for as long as a long launch lasts, and as nothing is held.
    #[must_use]
    pub(crate) fn bound(mut self, now_ns: u64) -> Self {
        let least_ns = |ns: u64, after_ns| ns.min(now_ns.saturating_add(after_ns));
        self.until_ns = least_ns(self.until_ns, TIMES * LONGEST_NS_MAX);
        self.off_until_ns = least_ns(self.off_until_ns, OFF_NS << DOUBLINGS_MAX);
        if let Some(Held { next_until_ns: Some(until_ns), .. }) = &mut self.held {
            *until_ns = least_ns(*until_ns, MOMENT_NS);
        }
        self
    }
}
