//! A second policy that sees what the active one sees. Its answers are compared and
//! never used.
//!
//! It reads a log as it is made, on a thread of its own: the dispatch thread only copies
//! into a ring, as for a recording. Whatever it does (traps, loops, uses up its share of
//! a CPU) ends at most itself.

use super::budget::Budget;
use super::{NAP, Wish};
use crate::files::PolicyFiles;
use rustix::time::{ClockId, clock_gettime};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tally_admin::{ShadowShare, ShadowStatus, Source};
use tally_decision_log::compare::KINDS;
use tally_decision_log::record::kind;
use tally_decision_log::{Player, TapReader, decode};
use tally_engine::policy::Policy;
use tally_ipc::wait::now_ns;
use tally_wasm_host::{Cancel, Compiled, ComponentFile, Limits, PolicyHost, Trust, WasmPolicy};

/// Most kernels and clients that are shown.
const TOP: usize = 10;
/// Time of one of its calls by the clock, at least.
const CALL_TIME_MS: u64 = 5_000;
/// How often status is brought up to date.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);

/// A component, compiled: the same for every instance, whatever becomes of its file.
pub struct Component {
    compiled: Compiled,
    path: PathBuf,
    config: String,
    first: Option<WasmPolicy>,
}

impl Component {
    /// Compile and start it, under the rules for policies that are to be made
    /// active. Takes tens of milliseconds.
    ///
    /// # Errors
    /// Everything an operator needs to know.
    pub fn load(policy: &crate::config::Policy, files: PolicyFiles) -> Result<Self, String> {
        let PolicyFiles { source, component, signature, config_text: config } = files;
        let trust = Trust::open(&policy.trust).map_err(|e| e.to_string())?;
        // Fuel bounds its calls; how busy the machine is must not look like disagreement.
        let call_cpu_ms_max = policy.limits.call_cpu_ms_max.max(CALL_TIME_MS);
        let limits = Limits { call_cpu_ms_max, ..policy.limits.clone() };
        let host = PolicyHost::new(limits).map_err(|e| e.to_string())?;
        let host = host.granting(policy.capabilities).trusting(trust);
        let Source { file: path, config_file } = source;
        let component = ComponentFile::new(&path, component, signature);
        let compiled = host.compile(&component, &Cancel::never()).map_err(|e| e.to_string())?;
        let first = compiled.start(&config, None);
        let first = Some(first.map_err(|e| e.with_config_file(config_file.as_deref()))?);
        Ok(Component { compiled, path, config, first })
    }

    /// An instance: at first the one that was started to check the component.
    fn instance(&mut self) -> Result<Box<dyn Policy + Send>, String> {
        let policy = match self.first.take() {
            Some(first) => first,
            None => self.compiled.start(&self.config, None).map_err(|e| e.to_string())?,
        };
        Ok(Box::new(policy))
    }
}

#[derive(Default)]
struct Progress {
    over: AtomicBool,
    reason: Mutex<Option<String>>,
    status: Mutex<ShadowStatus>,
}

impl Progress {
    fn end(&self, why: &str) {
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        reason.get_or_insert_with(|| why.into());
    }
    fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    fn status(&self) -> std::sync::MutexGuard<'_, ShadowStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A shadow, running or ended.
pub struct Shadow {
    id: u64,
    path: PathBuf,
    progress: Arc<Progress>,
}

fn thread_cpu_ns() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

impl Shadow {
    /// Let it see what comes out of `reader`, on a thread of its own.
    ///
    /// # Errors
    /// If no thread can be had.
    pub fn start(
        id: u64,
        mut component: Component,
        cpu_percent: f64,
        reader: TapReader,
        wish: Wish,
    ) -> std::io::Result<Self> {
        let progress = Arc::new(Progress::default());
        let path = component.path.clone();
        *progress.status() = ShadowStatus {
            running: true,
            name: component.compiled.name().to_owned(),
            digest: component.compiled.digest().to_owned(),
            path: path.display().to_string(),
            cpu_percent,
            agreement_percent: 100.0,
            kinds: KINDS.map(Into::into).into(),
            ..Default::default()
        };
        let seen = progress.clone();
        std::thread::Builder::new().name("tally-shadow".into()).spawn(move || {
            let compiling_ns = Arc::new(AtomicU64::new(0));
            let spent = compiling_ns.clone();
            let player = Player::new(move |_| {
                let from = thread_cpu_ns();
                let instance = component.instance();
                spent.fetch_add(thread_cpu_ns() - from, Relaxed);
                instance
            })
            .of_another();
            let budget = Budget::new(cpu_percent, now_ns(), thread_cpu_ns());
            Watching { player, reader, budget, compiling_ns, progress: seen, wish, wished: false }
                .run();
        })?;
        tracing::info!(file = %path.display(), "a shadow sees what the active policy sees");
        Ok(Shadow { id, path, progress })
    }

    /// Id of the tap that the shadow reads.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the shadow's thread still runs.
    pub fn is_running(&self) -> bool {
        !self.progress.over.load(Relaxed)
    }

    /// Notes why the shadow ends; the first reason stands.
    pub fn end(&self, why: &str) {
        self.progress.end(why);
    }

    pub fn status(&self) -> ShadowStatus {
        self.progress.status().clone()
    }
}

struct Watching {
    player: Player<'static>,
    reader: TapReader,
    budget: Budget,
    compiling_ns: Arc<AtomicU64>,
    progress: Arc<Progress>,
    wish: Wish,
    wished: bool,
}

impl Watching {
    fn run(mut self) {
        let mut record = Vec::new();
        let mut published = Instant::now();
        while !self.reader.is_over() {
            let mut any = false;
            while self.reader.next(&mut record) {
                any = true;
                if !self.wished {
                    self.see(&record);
                }
                if published.elapsed() >= PUBLISH_EVERY {
                    published = Instant::now();
                    self.publish(false);
                }
            }
            if self.reader.is_too_small() {
                self.wish_to_end("the ring is too small for the policy's configuration or its clients: raise log.ring_kib");
            }
            if !any {
                if published.elapsed() >= PUBLISH_EVERY {
                    published = Instant::now();
                    self.publish(false);
                }
                std::thread::sleep(NAP);
            }
        }
        self.progress.end("the core stopped");
        self.publish(true);
        let reason = self.progress.reason().unwrap_or_default();
        tracing::info!(reason, "the shadow ended");
        self.progress.over.store(true, Relaxed);
    }

    fn see(&mut self, bytes: &[u8]) {
        let may_decide = bytes.first() != Some(&kind::DECIDE)
            || self.budget.may_decide(now_ns(), thread_cpu_ns());
        if self.budget.is_hopeless(now_ns(), thread_cpu_ns) {
            return self.wish_to_end(
                "events alone take more than its share of a CPU: raise --cpu-percent",
            );
        }
        let fed = match decode::record(bytes) {
            Ok(record) => self.player.feed(&record, may_decide).map_err(|e| e.to_string()),
            Err(e) => Err(format!("a record is not understood: {e}")),
        };
        self.budget.forgive(self.compiling_ns.swap(0, Relaxed));
        if let Err(why) = fed {
            self.wish_to_end(&why);
        } else if let Some(why) = self.player.disabled() {
            self.wish_to_end(&why);
        }
    }

    /// The tap goes on until it is taken out.
    fn wish_to_end(&mut self, why: &str) {
        if !std::mem::replace(&mut self.wished, true) {
            self.progress.end(why);
            tracing::warn!("the shadow ends, the active policy goes on: {why}");
            self.wish.notify_one();
        }
    }

    fn publish(&self, over: bool) {
        let (c, world) = (self.player.comparison(), self.player.world());
        let kernels = c.top_kernels(TOP).into_iter().map(|(id, share)| ShadowShare {
            name: world.profiles.get(id).map_or("?".into(), |p| p.key.name.clone()),
            id,
            share,
        });
        let clients = c.top_clients(TOP).into_iter().map(|(id, share)| ShadowShare {
            name: world.clients.get(&id).map_or("(gone)".into(), |view| view.info.name.clone()),
            id,
            share,
        });
        let (kernels, clients) = (kernels.collect(), clients.collect());
        let mut status = self.progress.status();
        status.running = !over && !self.wished;
        status.active = self.player.about().name.clone();
        status.cpu_ms = thread_cpu_ns() as f64 / 1e6;
        status.agreement_percent = c.agreement_percent();
        status.comparison = c.summary();
        status.parts = self.player.parts();
        status.dropped = self.reader.dropped();
        status.events_missing = self.player.events_missing().into_iter().map(Into::into).collect();
        (status.kernels, status.clients) = (kernels, clients);
        status.ended = self.progress.reason().filter(|_| over || self.wished);
    }
}
