//! The launch path with a decision a launch: what a best-effort client does.
//!
//! One launch at a time of a stream, under the slot's [`turn`](crate::turn): publish the request,
//! wait for the answer, launch, put an event behind it (see [`completion`]). Launches of several
//! streams wait side by side; the core answers in the order of the tickets.
//!
//! What must hold, whatever happens to the core or the driver:
//! - the real function is called exactly once, in the stream's own order;
//! - a ticket once taken is published (or the core would wait for it for ever);
//! - a published launch is reported done, also when the driver refused it: the
//!   core would count it as in flight for ever;
//! - nothing here waits for the GPU.
//!
//! A ticket may be published to a core that never answers it: it died (its
//! successor starts at a later ticket), or it is stuck. Without a core the launch
//! follows the fail mode: go on unscheduled, or take a new ticket at the next core.

use crate::launch::{self, Call};
use crate::slots::{self, OVERFLOW, SLOTS, Slot};
use crate::state::{self, Registration};
use crate::turn::TurnGuard;
use crate::{
    aliases, capture, completion, demand, link, poller, quiesce, records, samples, tools, units,
};
use std::cell::Cell;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::time::Duration;
use tally_ipc::ClientRegion;
use tally_ipc::layout::submission_flags::{
    CAN_LIMIT, CAN_PREEMPT, CAN_PREPARE, CAN_SLICE, GRAPH, LEASED,
};
use tally_ipc::layout::whole_because;
use tally_ipc::ring::{self, Answer, Request};
use tally_ipc::wait::{self, CLIENT_NAP, CORE_STUCK_NS, now_ns};
use tally_preempt::cuda::{CuResult, SUCCESS, driver};
use tally_preempt::launch::{PlannedLaunch, Shape, StreamState, Target};
use tally_preempt::{prepare, settings, sm_limit};

/// A waiting thread asks for the events of its stream at every so many looks for its answer, once it has waited for so
/// long: most answers come sooner, and would be seen the later by a question's length.
const LOOKS_PER_POLL: u32 = 4;
const POLL_AFTER_NS: u64 = 5_000;

/// How a launch goes on.
enum Way {
    /// The core said how, to this ticket.
    Gated(Answer, u64),
    /// It was granted before: whole, or, to this ticket, on at most so many SMs.
    Leased(u64, u32),
    /// There is no core to ask, and the fail mode says go on.
    Unscheduled,
    /// The client is ungated, or became so meanwhile.
    Ungated,
}

/// How waiting for the core ended.
enum Waited<T> {
    Done(T),
    /// The core that was asked is gone.
    Lost,
    /// The core runs but makes no progress.
    Stuck,
}

/// Ask for a launch and carry it out.
pub fn launch(client: &'static ClientRegion, index: usize, call: &Call<'_>) -> CuResult {
    let slot = &SLOTS[index & 63];
    let Some(held) = slot.turn.enter() else {
        // In a signal handler, while this very thread waits with a launch into the same stream.
        return quiesce::while_open(|| launch::issue_counted(client, index, call));
    };
    completion::refresh(client, index, slot);
    // Held since before the first ticket: the order of numbers is the stream's.
    let before = slot.word.snapshot().sequence();
    // Best-effort programs have no units of work.
    if !state::is_best_effort() {
        units::note_held(client, index, call.is_graph);
    }
    let launch = Gated { client, index, slot, before, call, is_degraded: Cell::new(false) };
    let mut shape = None;
    let (mut answer, mut is_leased) = (None, false);
    match launch.ask(&held, &mut shape) {
        Way::Ungated => {
            held.goes_on();
            let _held = (index != OVERFLOW).then_some(held);
            return quiesce::while_open(|| launch::issue_ungated(client, index, call, false));
        }
        Way::Unscheduled => {
            client.counters.unscheduled.fetch_add(1, Relaxed);
        }
        Way::Leased(_, 0) => is_leased = true,
        Way::Leased(ticket, sms) => {
            is_leased = true;
            answer = Some((Answer::SmLimited(sms), ticket));
        }
        Way::Gated(Answer::Whole, _) => {}
        Way::Gated(decided, ticket) => answer = Some((decided, ticket)),
    }
    poller::note_leased(is_leased);
    held.goes_on();
    // Of streams that share a slot one may be full, so that the driver keeps the launch waiting: the others go on.
    let _held = (index != OVERFLOW).then_some(held);
    // A launch in another form is always measured: it is long, and few are. But for leased ones, which may be many.
    let sample = (answer.is_some() && !is_leased) || shape.is_some_and(|(_, sample)| sample);
    // While the shim loads code nothing may be launched that this could wait for, and nothing may come between the
    // parts of another thread's launch.
    let is_limited = matches!(answer, Some((Answer::SmLimited(_), _)));
    // A graph runs in the program's own stream.
    let is_unjoined = is_limited && !call.is_graph;
    let go = || {
        if sample {
            let stream = slots::explicit(call.stream, call.per_thread);
            completion::mark_before_sample(index, slot, stream);
        }
        let since = records::enqueued();
        let result = match (answer, shape) {
            (Some((answer, ticket)), Some((shape, _))) => {
                launch.transformed(answer, ticket, &shape)
            }
            _ => {
                launch.occupies_all(shape.map(|(shape, _)| shape));
                launch::issue_counted(client, index, call)
            }
        };
        // A degraded launch says nothing of its form's time. A limited one is watched, since it may not end.
        let sample = sample && !launch.is_degraded.get();
        launch.finish(sample, is_leased && !is_limited, since);
        // In another form, the code that was launched may be that of another module with the same kernel.
        if result == SUCCESS
            && answer.is_none()
            && let Some((shape, _)) = &shape
        {
            demand::learn(shape, || (call.target)());
            aliases::note(shape.kernel, || (call.target)());
        }
        result
    };
    if is_unjoined { quiesce::while_open_unjoined(go) } else { quiesce::while_open(go) }
}

impl Gated<'_> {
    /// Make the launch in another form, or whole if that cannot be.
    fn transformed(&self, answer: Answer, ticket: u64, shape: &Shape) -> CuResult {
        let Gated { client, index, before, call, .. } = *self;
        let target = (call.target)();
        if !matches!(answer, Answer::SmLimited(_)) || shape.flags & CAN_LIMIT == 0 {
            self.occupies_all(Some(*shape));
        }
        let offered = match answer {
            Answer::Slice(_) => CAN_SLICE,
            Answer::Preemptible(_) => CAN_PREEMPT,
            Answer::SmLimited(_) => CAN_LIMIT,
            Answer::Whole => 0,
        };
        if let Answer::SmLimited(_) = answer {
            sm_limit::note_decided(shape.kernel);
        }
        if shape.flags & offered == 0 {
            // Asked for so that it can be had later; the core counts this one as whole.
            let (context, device) = (self.slot.context.load(Relaxed), &self.slot.device);
            match &target {
                Target::Kernel(arguments) if shape.flags & CAN_PREPARE != 0 => {
                    let (kernel, device) = (shape.kernel as usize, device.load(Relaxed));
                    // How long it is expected to take, where the core says so.
                    let us = if let Answer::Preemptible(us) = answer { us } else { 0 };
                    prepare::prepare(kernel, arguments, context, device, us);
                }
                Target::Graph(_) if matches!(answer, Answer::Slice(_)) => {
                    prepare::prepare_gate(context);
                }
                Target::Graph(_) => {}
                Target::Kernel(_) | Target::Other => {}
            }
            quiesce::join_now();
            return launch::issue_counted(client, index, call);
        }
        let stream = slots::explicit(call.stream, call.per_thread);
        let planned = PlannedLaunch {
            client,
            slot: index,
            stream,
            context: self.slot.context.load(Relaxed),
            is_blocking: self.slot.non_blocking.load(Relaxed) == 0,
            kernel: shape.kernel,
            target,
            ticket,
            number: before.wrapping_add(1),
            follows: false,
        };
        let real = || {
            tally_preempt::launch(&planned, answer).unwrap_or_else(|| {
                client.counters.degraded.fetch_add(1, Relaxed);
                self.is_degraded.set(true);
                self.occupies_all(Some(*shape));
                quiesce::join_now();
                (call.real)()
            })
        };
        launch::issue_counted(client, index, &Call { real: &real, ..*call })
    }
}

/// A launch on its way, with its slot's turn held until it goes into the driver, or has come back.
struct Gated<'a> {
    client: &'a ClientRegion,
    index: usize,
    slot: &'a Slot,
    /// The slot's sequence before it; its own is the next.
    before: u32,
    call: &'a Call<'a>,
    /// It ran whole, and not as decided.
    is_degraded: Cell<bool>,
}

impl Gated<'_> {
    fn ask(&self, held: &TurnGuard<'_>, asked: &mut Option<(Shape, bool)>) -> Way {
        let Gated { client, index, .. } = *self;
        loop {
            let Some(registration) = state::registration() else {
                if !state::fail_hold() {
                    return Way::Unscheduled;
                }
                let start = now_ns();
                held.waits();
                state::wait_for_core(CLIENT_NAP);
                client.counters.waited_ns.fetch_add(now_ns().saturating_sub(start), Relaxed);
                continue;
            };
            if state::is_ungated() {
                return Way::Ungated;
            }
            if registration.is_stuck() && !state::fail_hold() {
                return Way::Unscheduled;
            }
            let (shape, _) = *asked.get_or_insert_with(|| {
                let mut shape = (self.call.shape)();
                if settings::is_enabled()
                    && index != OVERFLOW
                    && tools::whole_because() == whole_because::NOTHING
                    && !self.needs_no_offers(registration, &shape)
                {
                    shape.flags |= self.offers(&shape);
                }
                (shape, samples::is_sample(shape.kernel, shape.flags))
            });
            let mut request = Request {
                kernel: shape.kernel,
                flags: shape.flags,
                grid: shape.grid,
                block: shape.block,
                shared_bytes: shape.shared_bytes,
                stream: index as u32,
                completion: self.before.wrapping_add(1),
                demand: demand::of(&shape),
                limited_sms: 0,
            };
            let ticket = ring::take_ticket(client);
            let published = publish(client, registration, ticket, &mut request, held);
            let Some(registration) = published else { continue };
            if request.flags & LEASED != 0 {
                return Way::Leased(ticket, request.limited_sms);
            }
            let start = now_ns();
            let looks = Cell::new(0_u32);
            let wait = || {
                wait_until(client, registration, held, || {
                    let answer = ring::answer(registration.core, ticket);
                    // What it waits for may be something in flight in its own stream.
                    looks.set(looks.get().wrapping_add(1));
                    if answer.is_none()
                        && index != OVERFLOW
                        && looks.get().is_multiple_of(LOOKS_PER_POLL)
                        && now_ns().saturating_sub(start) > POLL_AFTER_NS
                    {
                        // A capture of another thread forbids this one to ask, by default.
                        let pace = completion::Pace::WAITED_FOR;
                        driver().relaxed(|| completion::poll_events(client, index, false, pace));
                    }
                    answer
                })
            };
            let waited = poller::while_waiting(wait);
            client.counters.waited_ns.fetch_add(now_ns().saturating_sub(start), Relaxed);
            match waited {
                Waited::Done(answer) => return Way::Gated(answer, ticket),
                Waited::Stuck => return Way::Unscheduled,
                // Without a core: the top of the loop applies the fail mode. With a
                // new one already: ask it.
                Waited::Lost => {}
            }
        }
    }
}

/// Publish a ticket, once there is room. Returns the core that will read it, or
/// `None` if none will: its core is gone, and the next one starts behind it.
fn publish(
    client: &ClientRegion,
    asked: &'static Registration,
    ticket: u64,
    request: &mut Request,
    held: &TurnGuard<'_>,
) -> Option<&'static Registration> {
    let mut registration = Some(asked);
    while let Some(e) = registration {
        let room = || ring::has_room(e.core, ticket).then_some(());
        if let Waited::Lost = wait_until(client, e, held, room) {
            registration = state::registration();
        } else {
            // Stuck counts as room: the requests overwritten are of launches that
            // went on unscheduled, or will.
            break;
        }
    }
    // Without a core every earlier ticket's owner is giving up as well: nobody's
    // request is overwritten. And published it must be: the next core may have
    // been told to start at or before this ticket.
    if let Some(e) = registration.filter(|e| e.core.granted.ticket.load(SeqCst) > ticket) {
        request.flags |= LEASED;
        let sms = e.core.granted.width_sms.load(Acquire);
        let may_end = request.flags & GRAPH != 0 || sm_limit::was_decided(request.kernel);
        if sms > 0 && request.flags & CAN_LIMIT != 0 && may_end {
            request.limited_sms = sms;
        }
    }
    ring::publish(client, ticket, request);
    let e = registration?;
    if ring::core_needs_wake(e.core) {
        link::wake_core();
    }
    (ticket >= e.first_ticket).then_some(e)
}

/// Wait for the core to do something: until `done` says that it has, until the
/// core is gone, or until it is stuck and the fail mode is not to hold.
fn wait_until<T>(
    client: &ClientRegion,
    registration: &'static Registration,
    held: &TurnGuard<'_>,
    done: impl Fn() -> Option<T>,
) -> Waited<T> {
    let look = || {
        done().map(Waited::Done).or_else(|| state::is_over(registration).then_some(Waited::Lost))
    };
    let mut spin = registration.spin;
    let mut heartbeat = registration.core.heartbeat.load(Relaxed);
    let mut beat_at = now_ns();
    loop {
        if let Some(waited) = wait::spin(spin, look) {
            return waited;
        }
        held.waits();
        if state::is_exiting() {
            return Waited::Stuck;
        }
        if let Some(waited) =
            wait::wait(client, registration.core, Duration::ZERO, CLIENT_NAP, look)
        {
            return waited;
        }
        spin = Duration::ZERO;
        let (now, beat) = (now_ns(), registration.core.heartbeat.load(Relaxed));
        if beat != heartbeat {
            heartbeat = beat;
            beat_at = now;
        } else if now.saturating_sub(beat_at) > CORE_STUCK_NS && !state::fail_hold() {
            registration.stuck_at.store(beat.wrapping_add(1), Relaxed);
            return Waited::Stuck;
        }
    }
}

impl Gated<'_> {
    /// The launch was granted ahead, so nobody decides about it, and its kernel was looked at: to find out what can
    /// be done to it would take the driver a microsecond or two.
    fn needs_no_offers(&self, registration: &Registration, shape: &Shape) -> bool {
        let Gated { client, call, .. } = *self;
        // Green contexts that went are made anew.
        if !capture::is_active() {
            sm_limit::serves(self.slot.context.load(Relaxed));
        }
        let granted = &registration.core.granted;
        // Another thread may take the ticket, and this one be asked about: as one that can only run whole, once.
        !call.is_graph
            && granted.width_sms.load(Acquire) == 0
            && granted.ticket.load(SeqCst) > client.activity.next_ticket.load(SeqCst)
            && prepare::is_looked_at(shape.kernel as usize)
    }

    /// What can be done to it.
    fn offers(&self, shape: &Shape) -> u32 {
        let Gated { client, index, slot, call, .. } = *self;
        let stream = StreamState {
            slot: index,
            context: slot.context.load(Relaxed),
            backlog: completion::backlog(client, index, slot),
            is_in_green: slot.green.load(Relaxed) != 0,
            has_attributes: slot.has_attributes.load(Relaxed),
        };
        let offers = || tally_preempt::offers(shape, &(call.target)(), &stream);
        // A capture of another thread could forbid this one to ask.
        if capture::is_active() { driver().relaxed(offers) } else { offers() }
    }

    /// The launch is about to be made on all SMs.
    fn occupies_all(&self, shape: Option<Shape>) {
        if sm_limit::may_serve(self.slot.context.load(Relaxed)) {
            let shape = shape.unwrap_or_else(self.call.shape);
            let number = self.before.wrapping_add(1);
            let target = (self.call.target)();
            let note = || tally_preempt::before_launch_on_all(self.index, number, &shape, &target);
            // As in `offers`.
            if capture::is_active() { driver().relaxed(note) } else { note() }
        }
    }

    /// See that the launch is reported done when it is.
    fn finish(&self, sample: bool, is_sparse: bool, since: u64) {
        let Gated { index, slot, before, call, .. } = *self;
        let seen = slot.word.snapshot();
        // A handler within the wait may have launched, too. One that is being launched now is not counted.
        let number = if seen.is_settled() { seen.sequence() } else { before.wrapping_add(1) };
        let stream = slots::explicit(call.stream, call.per_thread);
        completion::track_launch(index, slot, stream, number, sample, is_sparse, since);
    }
}
