//! One pass over all clients, in the order of [`Rotation`].

use super::Dispatch;
use super::client::Taken;
use super::heartbeat::HEARTBEAT_NS;
use super::share::Rotation;
use std::sync::atomic::Ordering::Relaxed;
use tally_ipc::wait::now_ns;

/// Clients that the next pass begins with, for each kind of work.
#[derive(Default)]
pub(super) struct Order {
    marks: Rotation,
    completions: Rotation,
    submissions: Rotation,
    wakes: Rotation,
}

impl Dispatch {
    /// Everything that clients did since the last pass. True if it was anything.
    pub(super) fn pass(&mut self, now: u64) -> bool {
        let was_in_flight = self.engine.has_in_flight();
        let mut active = self.take_activity(now);
        if active {
            self.beat();
        }
        self.measuring.look(self.clients.iter_mut());
        active |= self.take_completions(now);
        let is_due = self.engine.next_deadline_ns().is_some_and(|due| due <= now);
        if is_due {
            self.engine.tick(now, &mut self.actions);
            // There was too much for one.
            active |= self.engine.next_deadline_ns() == Some(0);
        }
        self.apply(now);
        active |= self.take_submissions(now);
        active |= self.clients.iter().any(|c| c.is_to_be_woken());
        if (active || is_due) && !was_in_flight && self.engine.has_in_flight() {
            self.last_progress_ns = now;
        }
        let high = self.wants_high_activity();
        for c in self.clients.iter_mut().filter(|c| high || !c.is_high()) {
            c.poll_probe(now);
        }
        active
    }

    fn take_activity(&mut self, now: u64) -> bool {
        let mut active = false;
        for at in self.order.marks.begin(self.clients.iter().map(|c| c.id())) {
            let c = &mut self.clients[at];
            if !c.is_high() {
                continue;
            }
            let share = c.left(self.iterations, self.share);
            let (stall_ns, engine) = (self.settings.high_stall_ns, &mut self.engine);
            active |= c.poll_activity(now, share, stall_ns, engine, &mut self.actions);
            if self.engine.is_over_time() || share.marks == 0 && c.has_more_units() {
                self.order.marks.skip(c.id());
            }
        }
        active
    }

    /// Within a pass: a long one, of slow policy calls for many clients, is work and no standstill.
    fn beat(&mut self) {
        let now = now_ns();
        if now >= self.next_beat_ns {
            self.next_beat_ns = now + HEARTBEAT_NS;
            for c in &self.clients {
                c.link.core.heartbeat.fetch_add(1, Relaxed);
            }
        }
    }

    fn take_completions(&mut self, now: u64) -> bool {
        let (mut active, mut looked) = (false, 0);
        if !self.clients.iter().any(|c| c.is_pending()) {
            self.looks_left = 0;
            return false;
        }
        for at in self.order.completions.begin(self.clients.iter().map(|c| c.id())) {
            let c = &mut self.clients[at];
            if !c.is_pending() {
                continue;
            }
            let share = c.left(self.iterations, self.share);
            if share.completions == 0 || self.engine.is_over_time() {
                active |= self.engine.is_over_time();
                self.order.completions.skip(c.id());
                continue;
            }
            let found = c.poll_completions(now, share, &mut self.engine, &mut self.actions);
            looked += found.streams;
            if found.moved {
                active = true;
                self.last_progress_ns = now;
                self.beat();
            }
        }
        // Before it sleeps all were looked at.
        let pending: u32 = self.clients.iter().map(|c| c.pending()).sum();
        self.looks_left = match self.looks_left {
            _ if looked >= pending => 0,
            0 => pending.div_ceil(looked.max(1)),
            left => left - 1,
        };
        active || self.looks_left > 0
    }

    fn take_submissions(&mut self, now: u64) -> bool {
        let (mut active, mut misbehaved) = (false, Vec::new());
        for at in self.order.submissions.begin(self.clients.iter().map(|c| c.id())) {
            let c = &mut self.clients[at];
            if !c.is_to_be_polled(now) {
                continue;
            }
            let share = c.left(self.iterations, self.share);
            if share.submissions == 0 {
                if c.has_launches() {
                    active = true;
                    self.order.submissions.skip(c.id());
                }
                continue;
            }
            let (engine, out) = (&mut self.engine, &mut self.actions);
            let taken = c.poll_submissions(now, share, engine, &mut self.profile_cache, out);
            if let Taken::Misbehaved(why) = taken {
                misbehaved.push((c.id(), why));
            }
            if !self.actions.is_empty() {
                self.apply(now);
            }
            // Behind the answers: it reads the clock.
            if let Taken::Launches(1..) = taken {
                active = true;
                self.beat();
            }
        }
        for (id, why) in misbehaved {
            if let Ok(at) = self.clients.binary_search_by_key(&id, |c| c.id()) {
                self.cut_off(now, at, why);
            }
        }
        active
    }

    /// Wake threads of those that were answered, or whose shim is to look at something, as many as may be in
    /// this iteration.
    pub(super) fn wake(&mut self) {
        if !self.clients.iter().any(|c| c.is_to_be_woken()) {
            return;
        }
        for at in self.order.wakes.begin(self.clients.iter().map(|c| c.id())) {
            let c = &mut self.clients[at];
            if c.is_to_be_woken() && !c.wake(self.iterations) {
                self.order.wakes.skip(c.id());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::control::{Control, NewClient};
    use super::super::harness::{self, Harness, REQUESTS_OF_ITERATION_MAX};
    use super::super::kernels::KernelShares;
    use super::super::park;
    use crate::loader::Loaded;
    use crate::quota::User;
    use rustix::fd::AsFd;
    use std::sync::atomic::Ordering::SeqCst;
    use tally_contract::limits::{MARK_SLOTS, PASS_MARKS_CLIENT_MAX, PASS_SUBMISSIONS_CLIENT_MAX};
    use tally_engine::policy::{Class, ClientInfo};
    use tally_ipc::layout::RING_SLOTS;
    use tally_ipc::map::{self, Mapped};
    use tally_ipc::marks::{Kind, Stated, What};
    use tally_ipc::ring::{self, Request};
    use tally_ipc::{ClientRegion, CoreRegion};

    const HOSTILE: u32 = 100;

    struct Client {
        region: Mapped<ClientRegion>,
        core: Mapped<CoreRegion>,
        ticket: u64,
    }

    impl Client {
        fn new(
            id: u32,
            uid: u32,
            class: Class,
            shares: &mut KernelShares,
        ) -> (Client, Box<NewClient>) {
            let (region_fd, region) = map::create_client().unwrap();
            let (core_fd, core) = map::create_core().unwrap();
            let info = ClientInfo { id, class, name: String::new(), labels: vec![] };
            let new = NewClient {
                info,
                region: map::open_client(region_fd.as_fd()).unwrap(),
                core,
                doorbell: park::eventfd().unwrap(),
                first_ticket: 0,
                kernels: shares.of(User::Uid(uid), false),
                witness: Default::default(),
            };
            let core = map::open_core(core_fd.as_fd()).unwrap();
            (Client { region, core, ticket: 0 }, Box::new(new))
        }

        fn launch(&mut self) {
            let request = Request {
                kernel: 0,
                flags: 0,
                grid: [1; 3],
                block: [1; 3],
                shared_bytes: 0,
                stream: 0,
                completion: self.ticket as u32 + 1,
                demand: Default::default(),
                limited_sms: 0,
            };
            ring::publish(&self.region, self.ticket, &request);
            self.ticket += 1;
        }

        /// False if there is no room.
        fn mark(&self) -> bool {
            let what = What::marked(Kind::Token, None).pack();
            let unit = Stated { began_ns: 1, ended_ns: 2, what };
            self.region.marks.publish(self.marks_read(), unit).is_some()
        }

        fn marks_read(&self) -> u64 {
            self.core.marks_read.load(SeqCst)
        }

        fn taken(&self) -> u64 {
            self.core.consumed.load(SeqCst)
        }
    }

    /// A hundred clients of one user, one of another, and when the last of them was served.
    fn joined(class: Class) -> (Harness, Vec<Client>, Client, u64) {
        let mut harness = Harness::new(harness::settings(), Loaded::grant_all()).unwrap();
        let mut shares = KernelShares::new(100);
        let mut clients = Vec::new();
        let mut now_ns = 1;
        for id in 1..=HOSTILE + 1 {
            let (client, new) = Client::new(id, u32::from(id <= HOSTILE), class, &mut shares);
            let (done, _joined) = tokio::sync::oneshot::channel();
            assert!(harness.send(Control::Join { client: new, min_share: None, done }));
            clients.push(client);
            if clients.len() % REQUESTS_OF_ITERATION_MAX == 0 {
                now_ns += 1;
                harness.iterate(now_ns);
            }
        }
        harness.iterate(now_ns);
        assert_eq!(harness.clients().count(), clients.len());
        let honest = clients.pop().unwrap();
        (harness, clients, honest, now_ns)
    }

    #[test]
    fn a_hundred_clients_of_one_user_take_a_pass_of_one() {
        let (mut harness, mut clients, mut honest, mut now_ns) = joined(Class::BestEffort);
        clients.iter_mut().for_each(|c| (0..RING_SLOTS).for_each(|_| c.launch()));
        let all = |clients: &[Client]| clients.iter().map(Client::taken).sum::<u64>();
        let mut iterations = 0;
        while all(&clients) < u64::from(HOSTILE) * RING_SLOTS as u64 {
            let before = all(&clients);
            honest.launch();
            now_ns += 100_000;
            harness.iterate(now_ns);
            iterations += 1;
            assert!(ring::answer(&honest.core, honest.ticket - 1).is_some(), "at once");
            honest.region.completions[0].done.store(honest.ticket as u32, SeqCst);
            let taken = all(&clients) - before;
            assert!((1..=PASS_SUBMISSIONS_CLIENT_MAX as u64).contains(&taken), "{taken}");
            if iterations == HOSTILE {
                assert!(clients.iter().all(|c| c.taken() > 0), "each has its turn");
            }
            assert!(iterations < 100 * HOSTILE, "none is left behind");
        }
    }

    #[test]
    fn a_status_reads_a_few_clients_in_a_pass_and_none_that_left() {
        let (mut harness, clients, _honest, now_ns) = joined(Class::High);
        let (done, mut status) = tokio::sync::oneshot::channel();
        assert!(harness.send(Control::Status { kernels: 10, done }));
        let (left, mut figures) = tokio::sync::oneshot::channel();
        let mut left = Some(left);
        let mut iterations = 0;
        let snapshot = loop {
            iterations += 1;
            harness.iterate(now_ns + iterations);
            if let Ok(snapshot) = status.try_recv() {
                break snapshot;
            }
            if iterations == 5
                && let Some(done) = left.take()
            {
                assert!(harness.send(Control::Leave { id: 2, done }));
            }
            assert!(iterations < 1_000, "no status");
        };
        assert!(iterations >= clients.len() as u64 / 4, "{iterations} passes");
        assert_eq!(figures.try_recv().unwrap().unwrap().numbers.id, 2);
        let read: Vec<u32> = snapshot.clients.iter().map(|client| client.id).collect();
        assert_eq!(read, harness.clients().collect::<Vec<_>>());
        assert!(!read.contains(&2));
    }

    #[test]
    fn a_hundred_clients_of_one_user_have_the_units_of_one_read() {
        let (mut harness, clients, honest, mut now_ns) = joined(Class::High);
        let marked: u64 =
            clients.iter().map(|c| (0..).take_while(|_| c.mark()).count() as u64).sum();
        assert_eq!(marked, u64::from(HOSTILE) * MARK_SLOTS as u64);
        let all = |clients: &[Client]| clients.iter().map(Client::marks_read).sum::<u64>();
        let mut iterations = 0;
        while all(&clients) < marked {
            let before = all(&clients);
            assert!(honest.mark());
            now_ns += 100_000;
            let sleeps_ns = harness.iterate(now_ns);
            iterations += 1;
            assert_eq!(honest.marks_read(), iterations, "at once");
            let read = all(&clients) - before;
            assert!((1..=PASS_MARKS_CLIENT_MAX as u64).contains(&read), "{read}");
            assert!(sleeps_ns.is_none() || all(&clients) == marked, "there is more");
            if iterations == u64::from(HOSTILE) {
                assert!(clients.iter().all(|c| c.marks_read() > 0), "each has its turn");
            }
        }
        assert_eq!(iterations, marked.div_ceil(PASS_MARKS_CLIENT_MAX as u64));
    }
}
