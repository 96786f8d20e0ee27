//! The launch path with a decision a launch: what a best-effort client does.
//!
//! One launch at a time of a stream, under the slot's lock: publish the request,
//! wait for the answer, launch, enqueue a completion write if one is due (see
//! [`completion`]; a launch that has to wait for something in flight sees to it
//! that a write is on its way). Launches of several
//! streams wait side by side; the core answers in the order of the tickets.
//!
//! What must hold, whatever happens to the core or the driver:
//! - the real function is called exactly once, in the stream's own order;
//! - a ticket once taken is published (or the core would wait for it for ever);
//! - a published launch is reported done, also when the driver refused it: the
//!   core would count it as in flight for ever. The completion write is enqueued
//!   behind a refused launch all the same, because earlier launches of the stream
//!   may still run and the word must not overtake them. Only if the write fails
//!   too, the shim waits for the stream (whose context is lost, most likely, so
//!   that there is nothing to wait for) and stores the host's word.
//!
//! A ticket may be published to a core that never answers it: it died (its
//! successor starts at a later ticket), or it is stuck. Without a core the launch
//! follows the fail mode: go on unscheduled, or take a new ticket at the next core.

use crate::activity;
use crate::cu::{CuResult, Ptr, SUCCESS, driver};
use crate::cut::form::Order;
use crate::launch::{self, Call, Shape, Target};
use crate::slots::{self, OVERFLOW, SLOTS, Slot};
use crate::state::{self, Epoch};
use crate::{attendant, completion, cut};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;
use tally_ipc::ClientRegion;
use tally_ipc::layout::submission_flags::{
    CAN_PARTITION, CAN_PREEMPT, CAN_PREPARE, CAN_SLICE, COALESCED, LEASED, SYNCHRONOUS,
};
use tally_ipc::ring::{self, Answer, Request};
use tally_ipc::wait::{self, CLIENT_NAP, now_ns};

/// A decision that depends on nothing in flight is there by then.
const DECISION: Duration = Duration::from_micros(5);
/// A core whose heartbeat stands still this long while a launch waits is stuck.
pub const STUCK_NS: u64 = 2_000_000_000;
/// Completion words further behind than this are brought up to date: the compare
/// wraps at 2^31.
const STALE_MAX: u32 = 1 << 30;

/// While a cut launch is under way: launches of a stream that may be behind it. A hardware queue takes
/// 1024 entries; a launch takes one.
const BACKLOG_MAX: u32 = 256;

/// How a launch goes on.
enum Way {
    /// The core said how, to this ticket.
    Decided(Answer, u64),
    /// There is no core to ask, and the fail mode says go on.
    Unscheduled,
    /// There is a standing grant (now).
    Standing,
}

/// How waiting for the core ended.
enum Waited<T> {
    /// As hoped.
    Done(T),
    /// The core that was asked is gone.
    Lost,
    /// It is there but does nothing.
    Stuck,
}

/// Ask for a launch and carry it out.
pub fn launch(client: &'static ClientRegion, index: usize, call: &Call<'_>) -> CuResult {
    let slot = &SLOTS[index & 63];
    let _held = slot.lock.lock();
    // Held since before the first ticket: the order of numbers is the stream's.
    let synchronous = index == OVERFLOW || !completion::ensure(client);
    refresh(client, index, slot, call);
    let before = slot.word.snapshot().sequence();
    let launch = Decided { client, index, slot, before, synchronous, call };
    launch.leave_room();
    let mut shape = None;
    let mut answer = None;
    match launch.ask(&mut shape) {
        Way::Standing => {
            slots::ran_ahead(index);
            return launch::unasked(client, index, call);
        }
        Way::Unscheduled => {
            client.counters.unscheduled.fetch_add(1, Relaxed);
        }
        Way::Decided(Answer::Whole, _) => {}
        Way::Decided(decided, ticket) => answer = Some((decided, ticket)),
    }
    // A cut launch is always measured: it is long, and few are.
    let sample = answer.is_some() || shape.is_some_and(|(_, sample)| sample);
    if sample && !synchronous && completion::unmarked(client, index, slot, before) != 0 {
        launch.mark_before();
    }
    let result = match (answer, shape) {
        (Some((answer, ticket)), Some((shape, _))) => launch.cut(answer, ticket, &shape),
        _ => launch::unasked(client, index, call),
    };
    launch.finish(result, sample);
    result
}

impl Decided<'_> {
    /// Make the launch in another form, or whole if that cannot be.
    fn cut(&self, answer: Answer, ticket: u64, shape: &Shape) -> CuResult {
        let Decided { client, index, before, call, .. } = *self;
        let target = (call.target)();
        let offered = match answer {
            Answer::Slice(_) => CAN_SLICE,
            Answer::Preemptible(_) => CAN_PREEMPT,
            Answer::Partition(_) => CAN_PARTITION,
            Answer::Whole => 0,
        };
        if shape.flags & offered == 0 {
            // Asked for so that it can be had later; the core counts this one as whole.
            let (context, device) = (self.slot.context.load(Relaxed), &self.slot.device);
            match &target {
                Target::Kernel(arguments) if shape.flags & CAN_PREPARE != 0 => {
                    let (kernel, device) = (shape.kernel as usize, device.load(Relaxed));
                    // How long it is expected to take, where the core says so.
                    let us = if let Answer::Preemptible(us) = answer { us } else { 0 };
                    cut::kernels::prepare(kernel, arguments, context, device, us);
                }
                Target::Graph(_) => cut::kernels::prepare_gate(context),
                Target::Kernel(_) | Target::Other => {}
            }
            return launch::unasked(client, index, call);
        }
        let order = Order {
            client,
            slot: index,
            stream: slots::explicit(call.stream, call.per_thread),
            kernel: shape.kernel,
            target,
            ticket,
            number: before.wrapping_add(1),
            follows: false,
        };
        let real = || {
            cut::form::launch(&order, answer).unwrap_or_else(|| {
                client.counters.degraded.fetch_add(1, Relaxed);
                (call.real)()
            })
        };
        launch::unasked(client, index, &Call { real: &real, ..*call })
    }
}

/// A launch on its way, with its slot's lock held.
struct Decided<'a> {
    client: &'a ClientRegion,
    index: usize,
    slot: &'a Slot,
    /// The slot's sequence before it; its own is the next.
    before: u32,
    /// Nothing will report its end: it is waited for.
    synchronous: bool,
    call: &'a Call<'a>,
}

/// Bring the completion words within reach of the next number.
fn refresh(client: &ClientRegion, index: usize, slot: &Slot, call: &Call<'_>) {
    let word = &client.completions.words[index & 63];
    let now = slot.word.snapshot().sequence();
    let behind = |w: u32| now.wrapping_sub(w) > STALE_MAX;
    if behind(word.gpu.load(Relaxed)) || behind(word.host.load(Relaxed)) {
        synchronize(call);
        word.gpu.store(now, SeqCst);
        word.host.store(now, SeqCst);
    }
}

fn synchronize(call: &Call<'_>) -> bool {
    let stream = slots::explicit(call.stream, call.per_thread) as Ptr;
    // SAFETY: the stream of the launch under way.
    driver().stream_synchronize.is_some_and(|f| unsafe { f(stream) } == SUCCESS)
}

impl Decided<'_> {
    /// Wait here rather than in the driver, which would hold its locks meanwhile: see
    /// [`cut::watch`].
    fn leave_room(&self) {
        let word = &self.client.completions.words[self.index & 63];
        let backlog = || {
            // Of what a write was enqueued behind; the rest is not more than a few.
            let marked = self.slot.marked.load(Relaxed);
            let behind = |done: u32| marked.wrapping_sub(done) as i32;
            behind(word.gpu.load(Relaxed)).min(behind(word.host.load(Relaxed))).max(0) as u32
        };
        cut::watch::wait_for_room_and(|| backlog() > BACKLOG_MAX);
    }

    fn ask(&self, asked: &mut Option<(Shape, bool)>) -> Way {
        let Decided { client, index, synchronous, .. } = *self;
        loop {
            let Some(epoch) = state::epoch() else {
                if !state::fail_hold() {
                    return Way::Unscheduled;
                }
                let start = now_ns();
                state::wait_for_core();
                client.counters.waited_ns.fetch_add(now_ns().saturating_sub(start), Relaxed);
                continue;
            };
            if state::is_standing() {
                return Way::Standing;
            }
            if epoch.is_stuck() && !state::fail_hold() {
                return Way::Unscheduled;
            }
            let (shape, sample) = *asked.get_or_insert_with(|| {
                let mut shape = (self.call.shape)();
                if !synchronous && cut::is_enabled() {
                    let context = self.slot.context.load(Relaxed);
                    shape.flags |= cut::offers(&shape, &(self.call.target)(), index, context);
                }
                (shape, completion::is_sample(shape.kernel, shape.flags))
            });
            let mut request = Request {
                kernel: shape.kernel,
                flags: shape.flags
                    | if synchronous { SYNCHRONOUS } else { 0 }
                    | if synchronous || sample { 0 } else { COALESCED },
                grid: shape.grid,
                block: shape.block,
                shared_bytes: shape.shared_bytes,
                stream: index as u32,
                completion: self.before.wrapping_add(1),
            };
            let ticket = ring::take_ticket(client);
            let Some(epoch) = publish(client, epoch, ticket, &mut request) else { continue };
            if request.flags & LEASED != 0 {
                return Way::Decided(Answer::Whole, ticket);
            }
            let start = now_ns();
            let answer = || ring::answer(epoch.core, ticket);
            let waited = match wait::spin(epoch.spin.min(DECISION), answer) {
                Some(answer) => Waited::Done(answer),
                None => self.wait_behind(epoch, answer),
            };
            client.counters.waited_ns.fetch_add(now_ns().saturating_sub(start), Relaxed);
            match waited {
                Waited::Done(answer) => return Way::Decided(answer, ticket),
                Waited::Stuck => return Way::Unscheduled,
                // Without a core: the top of the loop applies the fail mode. With a
                // new one already: ask it.
                Waited::Lost => {}
            }
        }
    }

    /// Wait for an answer that does not come at once: something in flight has to
    /// end first, so there must be a completion write for it on its way.
    fn wait_behind(
        &self,
        epoch: &'static Epoch,
        answer: impl Fn() -> Option<Answer>,
    ) -> Waited<Answer> {
        let Decided { client, index, slot, before, synchronous, .. } = *self;
        let _waiting = completion::Waiting::begin();
        // Even if an earlier write is on its way: nobody would wake this thread to
        // enqueue the next one when that arrives.
        if completion::unmarked(client, index, slot, before) != 0 {
            if synchronous {
                self.wait_for_earlier();
            } else {
                self.mark_before();
            }
        }
        wait_until(client, epoch, answer, || {
            // Again at each nap: the attendant may have had to pass a slot over.
            let busy = client.activity.busy_streams.load(SeqCst);
            let is_unmarked = |i: usize, s: &Slot| {
                busy & slots::bit(i) != 0
                    && completion::unmarked(client, i, s, s.word.snapshot().sequence()) != 0
            };
            if slots::in_use().any(|(i, s)| i != index && is_unmarked(i, s)) {
                attendant::mark_soon();
            }
        })
    }

    /// Wait for what was launched before this launch.
    fn wait_for_earlier(&self) {
        synchronize(self.call);
        self.slot.marked.store(self.before, Relaxed);
        completion::seen_done(self.client, self.index, self.before);
    }

    /// Enqueue a completion write for what was launched before this launch.
    fn mark_before(&self) {
        let Decided { client, index, slot, before, call, .. } = *self;
        let stream = slots::explicit(call.stream, call.per_thread);
        if let Err(error) = completion::write(index, slot, stream, before) {
            completion::fall_back(client, error);
            self.wait_for_earlier();
        }
    }
}

/// Publish a ticket, once there is room. Returns the core that will read it, or
/// `None` if none will: its core is gone, and the next one starts behind it.
fn publish(
    client: &ClientRegion,
    asked: &'static Epoch,
    ticket: u64,
    request: &mut Request,
) -> Option<&'static Epoch> {
    let mut epoch = Some(asked);
    while let Some(e) = epoch {
        let room = || ring::has_room(e.core, ticket).then_some(());
        if let Waited::Lost = wait_until(client, e, room, || ()) {
            epoch = state::epoch();
        } else {
            // Stuck counts as room: the requests overwritten are of launches that
            // went on unscheduled, or will.
            break;
        }
    }
    // Without a core every earlier ticket's owner is giving up as well: nobody's
    // request is overwritten. And published it must be: the next core may have
    // been told to start at or before this ticket.
    if epoch.is_some_and(|e| e.core.granted.ticket.load(SeqCst) > ticket) {
        request.flags |= LEASED;
    }
    ring::publish(client, ticket, request);
    let e = epoch?;
    if ring::must_ring(e.core) {
        e.ring();
    }
    (ticket >= e.first_ticket).then_some(e)
}

/// Wait for the core to do something, calling `before_nap` before each sleep: until `done` says that it has, until the
/// core is gone, or until it is stuck and the fail mode is not to hold.
fn wait_until<T>(
    client: &ClientRegion,
    epoch: &'static Epoch,
    done: impl Fn() -> Option<T>,
    before_nap: impl Fn(),
) -> Waited<T> {
    let look =
        || done().map(Waited::Done).or_else(|| state::is_over(epoch).then_some(Waited::Lost));
    let mut spin = epoch.spin;
    let mut heartbeat = epoch.core.heartbeat.load(Relaxed);
    let mut beat_at = now_ns();
    loop {
        if let Some(waited) = wait::spin(spin, look) {
            return waited;
        }
        before_nap();
        if attendant::is_exiting() {
            return Waited::Stuck;
        }
        if let Some(waited) = wait::wait(client, epoch.core, Duration::ZERO, CLIENT_NAP, look) {
            return waited;
        }
        spin = Duration::ZERO;
        let (now, beat) = (now_ns(), epoch.core.heartbeat.load(Relaxed));
        if beat != heartbeat {
            heartbeat = beat;
            beat_at = now;
        } else if now.saturating_sub(beat_at) > STUCK_NS && !state::fail_hold() {
            epoch.stuck_at.store(beat.wrapping_add(1), Relaxed);
            return Waited::Stuck;
        }
    }
}

impl Decided<'_> {
    /// See that the launch is reported done when it is.
    fn finish(&self, result: CuResult, sample: bool) {
        let Decided { client, index, slot, before, synchronous, call } = *self;
        let number = before.wrapping_add(1);
        if !synchronous {
            if result == SUCCESS && !sample && !completion::is_due(client, index, slot, number) {
                return;
            }
            let stream = slots::explicit(call.stream, call.per_thread);
            match completion::write(index, slot, stream, number) {
                Ok(()) => return,
                Err(error) if result == SUCCESS => completion::fall_back(client, error),
                Err(_) => {}
            }
        }
        let seen = slot.word.snapshot();
        let done = synchronize(call);
        slot.marked.store(number, Relaxed);
        client.completions.words[index & 63].host.store(number, SeqCst);
        // A slot of many streams is not idle because one of them is, unless all of
        // their launches were waited for like this one.
        if done && (index != OVERFLOW || !slots::overflow_ran_ahead()) {
            attendant::report_change(activity::covered(
                &client.activity,
                &slot.word,
                slots::bit(index),
                seen,
            ));
        }
    }
}
