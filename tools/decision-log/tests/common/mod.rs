//! What the tests share: random streams of inputs to an engine with a recorder.
#![allow(dead_code, reason = "each test file uses a part")]

use proptest::prelude::*;
use std::path::PathBuf;
use tally_decision_log::recorder::Described;
use tally_decision_log::{
    About, Header, Reader, Record, Recorded, Recorder, Tap, TapOptions, TapReader, Writer,
};
use tally_engine::policy::{
    Answer, Class, ClientInfo, Context, Event, Fault, Launch, Policy, Subscriptions,
};
use tally_engine::profile::{KernelKey, Transformation};
use tally_engine::{Engine, EngineConfig, Measured, Submission};
use tally_wasm_host::{Compiler, Limits, PolicyHost};

/// A guest built by `cargo xtask policies`. Never skips.
pub fn guest(folder: &str, name: &str) -> PathBuf {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let target = target.parent().expect("the target folder");
    let file = target.join("release").join(folder).join(name).with_extension("wasm");
    assert!(file.is_file(), "{} is missing: run `cargo xtask policies` first", file.display());
    file
}

/// Without the bound on CPU time: a busy machine must not change answers.
pub fn host() -> PolicyHost {
    PolicyHost::compiling_by(
        Compiler::in_process(),
        Limits { call_cpu_ms_max: 30_000, ..Limits::default() },
    )
    .unwrap()
}

/// A policy with a name, as the daemon's has one.
pub struct Named(pub Box<dyn Policy + Send>, pub &'static str);

impl Described for Named {
    fn about(&self) -> About {
        About { name: self.1.into(), ..About::default() }
    }
}

impl Policy for Named {
    fn subscriptions(&self) -> Subscriptions {
        self.0.subscriptions()
    }
    fn start(&mut self, context: &mut Context) {
        self.0.start(context);
    }
    fn count_fault(&mut self, now_ns: u64, fault: &Fault) {
        self.0.count_fault(now_ns, fault);
    }
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        self.0.decide(launch, context)
    }
    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        self.0.on_event(now_ns, event, context)
    }
}

pub fn client(id: u32) -> ClientInfo {
    let (class, name) = (Class::BestEffort, format!("c{id}"));
    ClientInfo { id, class, name, labels: vec![] }
}

/// One input to the engine.
#[derive(Clone, Debug)]
pub enum Input {
    Join(u32, bool),
    Leave(u32),
    /// Client, kernel, shape, forms on offer.
    Submit(u32, u8, u8, u32),
    /// Client: the oldest launch on its stream ends.
    End(u32, u8),
    Yielded(u32, u16),
    Activity(u32, bool),
    /// A client has another floor, permille.
    Floor(u32, u32),
    /// Client: tokens that took so long end, or another objective for them.
    Tokens(u32, u32),
    Transform(u8, u8),
    Forget(u8),
    Tick,
}

pub fn input() -> impl Strategy<Value = Input> {
    let client = 0u32..5;
    prop_oneof![
        2 => (client.clone(), any::<bool>()).prop_map(|(c, high)| Input::Join(c, high)),
        1 => client.clone().prop_map(Input::Leave),
        8 => (client.clone(), 0u8..12, 0u8..3, 0u32..16)
            .prop_map(|(c, k, s, f)| Input::Submit(c, k, s, f)),
        6 => (client.clone(), 1u8..4).prop_map(|(c, n)| Input::End(c, n)),
        2 => (client.clone(), any::<u16>()).prop_map(|(c, ns)| Input::Yielded(c, ns)),
        3 => (client.clone(), any::<bool>()).prop_map(|(c, busy)| Input::Activity(c, busy)),
        2 => (client.clone(), prop_oneof![Just(0), 10_u32..=900])
            .prop_map(|(c, permille)| Input::Floor(c, permille)),
        1 => (client, 0_u32..50_000).prop_map(|(c, us)| Input::Tokens(c, us)),
        2 => (0u8..12, 0u8..5).prop_map(|(k, s)| Input::Transform(k, s)),
        1 => (0u8..12).prop_map(Input::Forget),
        3 => Just(Input::Tick),
    ]
}

/// Inputs with the time that passes before each.
pub fn inputs() -> impl Strategy<Value = Vec<(u64, Input)>> {
    let gap = prop_oneof![Just(0), 1u64..2_000, 10_000u64..300_000, 1_000_000u64..20_000_000];
    prop::collection::vec((gap, input()), 1..250)
}

/// Drives an engine as the daemon would.
pub struct Driver {
    pub engine: Engine,
    pub recorder: Recorder,
    pub now_ns: u64,
    tickets: [u64; 5],
    ended: [u64; 5],
    out: Vec<tally_engine::Action>,
    generation: u64,
}

impl Driver {
    pub fn new(policy: Named, recorder: Recorder) -> Self {
        let recorded = Recorded::new(policy, 1, recorder.clone());
        let config = EngineConfig { window_ns: 300_000, sm_count: 132, ..Default::default() };
        let engine = Engine::new(config, Box::new(recorded));
        Driver {
            engine,
            recorder,
            now_ns: 1_000,
            tickets: [0; 5],
            ended: [0; 5],
            out: Vec::new(),
            generation: 1,
        }
    }

    pub fn set_policy(&mut self, policy: Named) {
        self.generation += 1;
        let recorded = Recorded::new(policy, self.generation, self.recorder.clone());
        self.engine.set_policy(self.now_ns, Box::new(recorded), &mut self.out);
    }

    fn key(kernel: u8) -> KernelKey {
        let n = u32::from(kernel) * 300 + 1;
        KernelKey { name: format!("k{kernel}"), image: 1, grid: [n, 1, 1], block: [128, 1, 1] }
    }

    pub fn feed(&mut self, gap_ns: u64, input: &Input) {
        self.now_ns += gap_ns;
        let (e, now, out) = (&mut self.engine, self.now_ns, &mut self.out);
        match *input {
            Input::Join(id, high) => {
                let class = if high { Class::High } else { Class::BestEffort };
                let labels = vec![("slo".into(), format!("{id}"))];
                let info = ClientInfo { id, class, name: format!("c{id}"), labels };
                e.client_joined(now, info, self.tickets[id as usize], out);
            }
            Input::Leave(id) => e.client_left(now, id, out),
            Input::Submit(id, kernel, _, offered) => {
                let known = e.intern(&Self::key(kernel));
                let ticket = &mut self.tickets[id as usize];
                let submission = Submission {
                    ticket: *ticket,
                    kernel: known,
                    state: 0,
                    offered,
                    grid_blocks: u64::from(kernel) * 300 + 1,
                    block_threads: 128,
                    shared_bytes: 0,
                    stream: 0,
                    completion: (*ticket + 1) as u32,
                    started: false,
                    limited_sms: 0,
                };
                *ticket += 1;
                e.submitted(now, id, submission, out);
            }
            Input::End(id, count) => {
                let ended = &mut self.ended[id as usize];
                *ended = (*ended + u64::from(count)).min(self.tickets[id as usize]);
                let measured = Some(Measured { completion: *ended as u32, ns: 80_000 });
                e.progress(now, id, 0, *ended as u32, measured, out);
            }
            Input::Yielded(id, ns) => {
                e.launch_yielded(now, id, self.ended[id as usize], u64::from(ns) * 10 + 1);
            }
            Input::Activity(id, busy) => e.high_activity(now, id, busy, now, out),
            Input::Floor(id, permille) => e.set_min_share(now, id, permille, out),
            Input::Tokens(id, us) if us % 5 == 0 => {
                let ns = u64::from(us) * 1_000;
                let service = e.world().clients.get(&id).and_then(|client| client.service);
                let objective = service.and_then(|service| service.objective);
                e.set_objectives(now, id, objective, Some(ns).filter(|ns| *ns > 10_000), out);
            }
            Input::Tokens(id, us) => e.tokens_ended(id, us % 5, u64::from(us) * 1_000),
            Input::Transform(kernel, state) => {
                if let Some(id) = e.intern(&Self::key(kernel)) {
                    e.set_transformation(
                        id,
                        match state {
                            0 => Transformation::Unknown,
                            1 => Transformation::Preparable,
                            2 => Transformation::Preparing,
                            3 => Transformation::Ready { sliced: true, preemptible: true },
                            _ => Transformation::WholeOnly("its blocks wait for one another"),
                        },
                    );
                }
            }
            Input::Forget(kernel) => {
                e.forget_profile(kernel.into());
            }
            Input::Tick => {
                while e.next_deadline_ns().is_some_and(|due| due <= now) {
                    let due = e.next_deadline_ns();
                    e.tick(now, out);
                    if e.next_deadline_ns() == due {
                        break;
                    }
                }
            }
        }
        self.out.clear();
    }

    pub fn pump(&mut self) {
        while self.recorder.pump(self.engine.world_mut(), &mut || None) {}
    }
}

pub fn options(ring_bytes: usize, from_start: bool) -> TapOptions {
    TapOptions { ring_bytes, completions: false, from_start, state: false }
}

pub fn header() -> Header {
    Header {
        contract: "tally:policy@0.1.0".into(),
        core: "test".into(),
        started_unix_s: 1,
        limits: serde_json::json!({}),
        capabilities: Vec::new(),
    }
}

/// A recorder that records from the start.
pub fn recorded_into(ring_bytes: usize) -> (Recorder, TapReader) {
    let recorder = Recorder::default();
    let (tap, reader) = Tap::new(1, options(ring_bytes, true));
    recorder.insert(tap, &Default::default(), About::default(), Subscriptions::NONE);
    (recorder, reader)
}

/// Everything in the ring, through a file and back.
pub fn through_a_file(reader: &mut TapReader) -> Vec<Record> {
    let mut writer = Writer::new(Vec::new(), &header()).unwrap();
    let mut record = Vec::new();
    while reader.next(&mut record) {
        writer.raw(&record).unwrap();
    }
    let file = writer.into_inner();
    let mut log = Reader::new(&file[..]).unwrap();
    let mut all = Vec::new();
    while let Some(record) = log.next_record().unwrap() {
        all.push(record);
    }
    all
}
