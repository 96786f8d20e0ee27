//! A full window in which nothing ends: what it costs a program whose kernels wait for its later launches.

mod common;

use common::{LOW, built_in, granted, key, submission, took};
use tally_engine::{Action, Engine, Submission};

const MS: u64 = 1_000_000;
/// `window_stall_ns` by default.
const STALL: u64 = 500 * MS;

struct Program {
    engine: Engine,
    out: Vec<Action>,
    now_ns: u64,
    ticket: u64,
    first: Option<u32>,
    second: Option<u32>,
}

impl Program {
    fn new() -> Self {
        let mut engine = built_in();
        let [first, second] = ["first", "second"].map(|name| engine.intern(&key(name)));
        Program { engine, out: Vec::new(), now_ns: 0, ticket: 0, first, second }
    }

    fn submit(&mut self, kernel: Option<u32>, stream: u32) {
        let s = Submission { stream, ..submission(self.ticket, kernel) };
        self.ticket += 1;
        self.engine.submitted(self.now_ns, LOW, s, &mut self.out);
    }

    /// Launch one kernel and another one in another stream. The first ends `takes_ns` after its grant, but not before
    /// the second is granted. Returns how long the second waited.
    fn round(&mut self, takes_ns: u64) -> u64 {
        let start = self.now_ns;
        self.submit(self.first, 0);
        self.submit(self.second, 1);
        while granted(&self.out, LOW) < Some(self.ticket) {
            self.now_ns = self.engine.next_deadline_ns().expect("it is looked at again");
            self.engine.tick(self.now_ns, &mut self.out);
        }
        let waited = self.now_ns - start;
        self.now_ns = (self.now_ns + MS).max(start + takes_ns);
        let last = self.ticket as u32;
        for (stream, completion, ns) in [(0, last - 1, self.now_ns - start), (1, last, MS / 10)] {
            let measured = took(completion, ns);
            self.engine.progress(self.now_ns, LOW, stream, completion, measured, &mut self.out);
        }
        waited
    }
}

#[test]
fn a_kernel_that_waits_for_a_later_launch_stalls_once() {
    let mut program = Program::new();
    let waited = [(); 5].map(|()| program.round(0));
    assert_eq!(waited, [STALL, 0, 0, 0, 0]);
}

#[test]
fn a_kernel_that_is_as_long_with_what_follows_it_counts_again() {
    let mut program = Program::new();
    let waited = [(); 5].map(|()| program.round(STALL + 100 * MS));
    assert_eq!(waited, [STALL, 0, STALL, STALL, STALL]);
}

#[test]
fn one_launch_at_a_time_is_left_out_of_the_window() {
    let mut program = Program::new();
    assert_eq!(program.round(0), STALL);
    (0..4).for_each(|stream| program.submit(program.first, stream));
    // One that is left out, one that counts, and one more, as was let in before.
    assert_eq!(granted(&program.out, LOW), Some(5), "three of four");
    let due = program.engine.next_deadline_ns().unwrap();
    assert_eq!(due, program.now_ns + STALL);
}

/// As many launches as were let in before it ended.
#[test]
fn what_it_waits_for_goes_at_once_although_the_window_is_full() {
    let mut program = Program::new();
    let round = |program: &mut Program| {
        let start = program.now_ns;
        program.submit(program.first, 0);
        // Behind it in its stream, of unknown length: one at a time.
        (0..4).for_each(|_| program.submit(None, 0));
        while granted(&program.out, LOW) < Some(program.ticket) {
            program.now_ns = program.engine.next_deadline_ns().expect("it is looked at again");
            program.engine.tick(program.now_ns, &mut program.out);
        }
        let waited = program.now_ns - start;
        program.now_ns += MS;
        let (now_ns, last) = (program.now_ns, program.ticket as u32);
        for done in [last - 4, last] {
            program.engine.progress(now_ns, LOW, 0, done, took(done, MS), &mut program.out);
        }
        waited
    };
    let waited = [(); 4].map(|()| round(&mut program));
    assert_eq!(waited, [3 * STALL, 0, 0, 0]);
}
