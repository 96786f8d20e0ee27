//! The parties of a world, and how faults are made and undone.

use super::check::{Expected, PERIOD, Rounds};
use super::plan::{Batch, Fault, Kind, PROGRAMS, Party, Random};
use super::{Counted, Means, Outcome, threads};
use crate::process::{Process, wait_until};
use crate::{Artefacts, Class, Device, Scene};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Rounds that a program must complete after a batch: the first may have begun before its end.
const ROUNDS_AFTER: u64 = 2;
/// Mount options of the core's own small file system.
const SPACE: &str = "size=1m,mode=0755";
/// Stops or signals of an interruption.
const INTERRUPTIONS: u64 = 40;
const INTERRUPTION: Duration = Duration::from_micros(400);
/// A policy takes over after one batch in so many.
const RELOAD_EVERY: u64 = 8;
/// Batches between two lines on progress.
const TOLD_EVERY: usize = 200;
/// Times of this shared machine must not matter, and a stopped program is not waited for.
const CONFIGURATION: &str = "[policy]\nwatch = false\n[policy.limits]\ncall_cpu_ms_max = 2000\n\
     [policy.disabling]\nstall_ms = 60000\n[engine]\nhigh_stall_ms = 1000\n[profiles]\nsave_every_s = 1\n\
     [sm_limits]\nreserve_sms = [1]\n";
const RANDOM_FORMS: &str = "form = 5\ntoggle_us = 4000\nhold_us = 1500\nseed = 5\n";
/// Clients have a width, which changes.
const WIDTHS: &str = "form = 6\nlease = 5\ntoggle_us = 1000\nseed = 6\n";

struct Program {
    process: Process,
    rounds: Rounds,
}

struct World<'a> {
    scene: Scene,
    means: Means,
    patience: Duration,
    policies: Vec<(PathBuf, Option<PathBuf>)>,
    config: String,
    expected: &'a [Expected],
    random: Random,
    core: Process,
    programs: Vec<Program>,
    hostile: Process,
    /// Tricks that the hostile client has not answered yet.
    tricks: u64,
    incarnations: u64,
    /// Of the present core, when last asked.
    counted: Counted,
    outcome: Outcome,
}

/// How to undo a fault.
enum Undo {
    Nothing,
    Start { clock_s: i64 },
    Continue,
    Limit(Resource, Rlimit),
    Space(PathBuf),
}

fn class_of(program: usize) -> Class {
    if program == 0 { Class::High } else { Class::BestEffort }
}

fn job(scene: &Scene, program: usize) -> Result<Command> {
    let mut command = scene.program("tally-chaos-program")?;
    command.arg(format!("--seed={}", program + 1)).arg(format!("--period={PERIOD}"));
    if program == 0 {
        command.args(["--gap-us=8000", "--launches=3"]);
    }
    Ok(command)
}

/// Makes every batch of faults in a world of its own.
///
/// # Errors
/// What was lost, doubled or wrong, or who hangs.
pub fn run(
    artefacts: &Artefacts,
    means: Means,
    seed: u64,
    batches: &[Batch],
    patience: Duration,
) -> Result<Outcome> {
    // Of two there is one to be limited to.
    let scene = Scene::new(artefacts, Device::Software { sms: 2 })?;
    let mut expected = Vec::new();
    for program in 0..PROGRAMS {
        let mut bare = job(&scene, program)?;
        bare.arg(format!("--rounds={PERIOD}"));
        let mut bare = scene.start("bare", bare)?;
        let status = bare.wait(patience)?;
        ensure!(status.success(), "without the core: {status}\n{}", bare.quote());
        expected.push(Expected::of(&bare.stdout()?).context("without the core")?);
    }
    let mut world = World::new(scene, means, seed, &expected, patience)?;
    world.check().context("before the first fault")?;
    let mut made = 0;
    for (n, batch) in batches.iter().enumerate() {
        let mut step = || -> Result<()> {
            world.make(batch)?;
            world.check()?;
            world.perhaps_reload()
        };
        step().with_context(|| format!("after {made} faults, batch {n}: {batch:?}"))?;
        made += batch.len();
        if n % TOLD_EVERY == TOLD_EVERY - 1 {
            eprintln!("seed {seed}: {made} faults, {} rounds", world.outcome.rounds);
        }
    }
    world.end().context("at the end")
}

impl<'a> World<'a> {
    fn new(
        scene: Scene,
        means: Means,
        seed: u64,
        expected: &'a [Expected],
        patience: Duration,
    ) -> Result<Self> {
        let file = |name: &str, text: &str| -> Result<PathBuf> {
            let path = scene.dir().join(name);
            std::fs::write(&path, text)?;
            Ok(path)
        };
        let config = file("core.toml", CONFIGURATION)?.to_string_lossy().into_owned();
        let random_forms = (
            scene.artefacts().test_policy("random-forms")?,
            Some(file("random-forms.toml", RANDOM_FORMS)?),
        );
        let priority = scene.artefacts().policy("tally-priority")?;
        let other = file("other.toml", "idle_gap_us = 50\n")?;
        let widths = (random_forms.0.clone(), Some(file("widths.toml", WIDTHS)?));
        let policies =
            vec![(priority.clone(), None), random_forms, (priority, Some(other)), widths];
        std::fs::create_dir_all(scene.state_dir())?;
        let mut random = Random::new(!seed);
        let core = start_core(&scene, means, &policies, &config, random.draw(), 0)?;
        await_core(&scene, patience)?;
        let hostile = start_hostile(&scene)?;
        let mut world = World {
            means,
            patience,
            policies,
            config,
            expected,
            random,
            core,
            programs: Vec::new(),
            hostile,
            tricks: 0,
            incarnations: 0,
            counted: Counted::default(),
            outcome: Outcome::default(),
            scene,
        };
        for program in 0..PROGRAMS {
            let started = world.start_program(program, 0)?;
            world.programs.push(started);
        }
        Ok(world)
    }

    fn start_program(&mut self, program: usize, clock_s: i64) -> Result<Program> {
        self.incarnations += 1;
        let name = format!("program{program}-{}", self.incarnations);
        // The core may be away; one of the programs waits for it then.
        let options: &[&str] = match program {
            2 => &["--no-check", "--fail=hold"],
            _ => &["--no-check"],
        };
        let job = job(&self.scene, program)?;
        let mut command = self.scene.governed_with(class_of(program), &name, options, &job)?;
        if clock_s != 0 {
            command = at(clock_s, &[], &command);
        }
        Ok(Program { process: self.scene.start(&name, command)?, rounds: Rounds::default() })
    }

    fn process(&mut self, party: Party) -> &mut Process {
        match party {
            Party::Core => &mut self.core,
            Party::Program(n) => &mut self.programs[n].process,
            Party::Hostile => &mut self.hostile,
        }
    }

    fn pid(&mut self, party: Party) -> Result<Pid> {
        Pid::from_raw(self.process(party).pid() as i32).context("a process id")
    }

    /// Makes the faults of a batch at their times, and undoes them.
    fn make(&mut self, batch: &Batch) -> Result<()> {
        let began = Instant::now();
        let mut times: Vec<(Duration, usize, bool)> = Vec::new();
        for (n, fault) in batch.iter().enumerate() {
            times.push((fault.after, n, false));
            times.push((fault.after + fault.lasts, n, true));
        }
        times.sort();
        let mut undo: Vec<Undo> = batch.iter().map(|_| Undo::Nothing).collect();
        for (at, n, is_end) in times {
            std::thread::sleep(at.saturating_sub(began.elapsed()));
            let fault = &batch[n];
            if is_end {
                let undo = std::mem::replace(&mut undo[n], Undo::Nothing);
                self.undo(fault.party, undo).with_context(|| format!("undoing {fault:?}"))?;
            } else {
                undo[n] = self.begin(fault).with_context(|| format!("making {fault:?}"))?;
                let at = Kind::ALL.iter().position(|kind| *kind == fault.kind);
                self.outcome.faults[at.context("a kind")?] += 1;
            }
        }
        Ok(())
    }

    fn begin(&mut self, fault: &Fault) -> Result<Undo> {
        let mut random = Random::new(fault.seed);
        let party = fault.party;
        Ok(match fault.kind {
            Kind::Kill => {
                self.kill(party)?;
                Undo::Start { clock_s: 0 }
            }
            Kind::Clock => {
                self.kill(party)?;
                Undo::Start { clock_s: clock_offset_s(&mut random)? }
            }
            Kind::StopShort | Kind::StopLong => {
                self.process(party).signal(Signal::STOP)?;
                Undo::Continue
            }
            Kind::Files => {
                let pid = self.pid(party)?;
                let open = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_pid()))?.count();
                let limit = random.below(open as u64 + 3);
                Undo::Limit(Resource::Nofile, lower(pid, Resource::Nofile, limit)?)
            }
            Kind::FileSize => {
                let pid = self.pid(party)?;
                self.record(&self.scene.dir().join("limited.tallylog"));
                Undo::Limit(Resource::Fsize, lower(pid, Resource::Fsize, 4096)?)
            }
            Kind::Space => {
                // As the core sees it.
                let root = PathBuf::from(format!("/proc/{}/root", self.core.pid()));
                let state = self.scene.state_dir();
                let folder = root.join(state.strip_prefix("/")?);
                self.record(&folder.join("run.tallylog"));
                fill(&folder.join("ballast"))?;
                Undo::Space(folder)
            }
            Kind::Interrupt => {
                self.interrupt(party, &mut random)?;
                Undo::Nothing
            }
            Kind::Memory => {
                self.hostile.tell(&format!("trick {}", fault.seed))?;
                self.tricks += 1;
                Undo::Nothing
            }
        })
    }

    fn undo(&mut self, party: Party, undo: Undo) -> Result<()> {
        match undo {
            Undo::Nothing => {}
            Undo::Continue => self.process(party).signal(Signal::CONT)?,
            Undo::Limit(resource, old) => {
                prlimit(Some(self.pid(party)?), resource, old)?;
                if resource == Resource::Fsize {
                    let _ = self.ask(&json!({"cmd": "log_stop"}));
                    let _ = std::fs::remove_file(self.scene.dir().join("limited.tallylog"));
                }
            }
            Undo::Space(folder) => {
                std::fs::remove_file(folder.join("ballast"))?;
                let _ = self.ask(&json!({"cmd": "log_stop"}));
                let _ = std::fs::remove_file(folder.join("run.tallylog"));
            }
            Undo::Start { clock_s } => match party {
                Party::Core => {
                    let policy = self.random.draw();
                    self.core = start_core(
                        &self.scene,
                        self.means,
                        &self.policies,
                        &self.config,
                        policy,
                        clock_s,
                    )?;
                    self.await_core()?;
                }
                Party::Program(n) => self.programs[n] = self.start_program(n, clock_s)?,
                Party::Hostile => self.hostile = start_hostile(&self.scene)?,
            },
        }
        Ok(())
    }

    /// SIGKILL, after a look at what it had said.
    fn kill(&mut self, party: Party) -> Result<()> {
        self.sound(party)?;
        self.process(party).kill()?;
        match party {
            Party::Program(n) => self.account(n)?,
            Party::Hostile => self.tricks = 0,
            Party::Core => std::mem::take(&mut self.counted).add_to(&mut self.outcome),
        }
        self.sound(party)
    }

    /// What a program completed counts before it is replaced.
    fn account(&mut self, n: usize) -> Result<()> {
        let program = &mut self.programs[n];
        program.rounds.read(&mut program.process, &self.expected[n])?;
        self.outcome.rounds += program.rounds.complete;
        self.outcome.launches += program.rounds.launched;
        self.outcome.signals += program.rounds.signals;
        Ok(())
    }

    /// That a party has not ended by itself, nor panicked.
    fn sound(&mut self, party: Party) -> Result<()> {
        let process = self.process(party);
        if let Some(end) = process.poll()?
            && !process.was_killed()
        {
            bail!("{} ended by itself: {end}\n{}", process.name(), process.quote());
        }
        let said = process.stderr()?;
        ensure!(!said.contains("panicked at"), "{} panicked\n{}", process.name(), process.quote());
        Ok(())
    }

    /// Records decisions to a file, if the core can.
    fn record(&self, file: &std::path::Path) {
        let _ = self.ask(&json!({"cmd": "log_record", "path": file, "completions": true}));
    }

    fn interrupt(&mut self, party: Party, random: &mut Random) -> Result<()> {
        let pid = self.pid(party)?;
        let handled = party != Party::Core && random.below(2) == 0;
        for _ in 0..INTERRUPTIONS {
            if handled {
                kill_process(pid, Signal::USR1)?;
            } else {
                kill_process(pid, Signal::STOP)?;
                std::thread::sleep(INTERRUPTION);
                kill_process(pid, Signal::CONT)?;
            }
            std::thread::sleep(INTERRUPTION);
        }
        if party == Party::Core && random.below(2) == 0 {
            kill_process(pid, Signal::HUP)?;
        }
        Ok(())
    }

    /// One admin request. An error is no answer, or a refusal.
    fn ask(&self, request: &Value) -> Result<Value> {
        ask(&self.scene, request, self.patience)
    }

    fn await_core(&mut self) -> Result<()> {
        let waited = await_core(&self.scene, self.patience);
        waited.with_context(|| self.hanging(Party::Core))
    }

    /// Everybody answers, is registered and gets on, and everything is right so far.
    fn check(&mut self) -> Result<()> {
        let limit = Instant::now() + self.patience;
        while self.tricks > 0 {
            let left = limit.saturating_duration_since(Instant::now());
            let answer = self.hostile.hear(left);
            let answer = answer.with_context(|| self.hanging(Party::Hostile))?;
            self.tricks -= 1;
            ensure!(answer["breach"] == false, "a breach that had to be refused: {answer}");
            let outcome = answer["outcome"].as_str().unwrap_or_default();
            self.outcome.refused +=
                u64::from(outcome.starts_with("Err") || outcome == "taken: false");
        }
        let before: Vec<u64> = self.programs.iter().map(|p| p.rounds.complete).collect();
        let mut wanted = Vec::new();
        for (n, complete) in before.iter().enumerate() {
            let program = &mut self.programs[n];
            program.rounds.read(&mut program.process, &self.expected[n])?;
            wanted.push(program.rounds.complete.max(*complete) + ROUNDS_AFTER);
        }
        for (n, wanted) in wanted.into_iter().enumerate() {
            while self.programs[n].rounds.complete < wanted {
                self.sound(Party::Program(n))?;
                self.sound(Party::Core)?;
                let program = &mut self.programs[n];
                program.rounds.read(&mut program.process, &self.expected[n])?;
                if Instant::now() > limit {
                    let hanging = self.hanging(Party::Program(n));
                    bail!("no progress for {:?}: {hanging}", self.patience);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        self.all_governed(limit)?;
        self.sound(Party::Core)?;
        self.sound(Party::Hostile)?;
        self.outcome.checks += 1;
        Ok(())
    }

    /// Every program is registered with the core again, which decides about it.
    fn all_governed(&mut self, limit: Instant) -> Result<()> {
        loop {
            let status = self.ask(&json!({"cmd": "status"}));
            let status = status.with_context(|| self.hanging(Party::Core))?;
            let clients = status["clients"].as_array().cloned().unwrap_or_default();
            let missing = self.programs.iter().position(|program| {
                // The name that it registered under is that of its process, less the number.
                let name = program.process.name().split_once('-').map_or("", |(_, name)| name);
                !clients.iter().any(|client| client["name"] == name && client["governed"] == true)
            });
            let Some(missing) = missing else {
                self.counted = Counted::of(&status);
                return Ok(());
            };
            if Instant::now() > limit {
                let hanging = self.hanging(Party::Program(missing));
                bail!("not registered within {:?}: {status:#}\n{hanging}", self.patience);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn perhaps_reload(&mut self) -> Result<()> {
        if self.random.below(RELOAD_EVERY) > 0 {
            return Ok(());
        }
        let (policy, config) = self.policies[self.random.below(4) as usize].clone();
        self.ask(&json!({"cmd": "policy_load", "path": policy, "config": config}))?;
        self.outcome.reloads += 1;
        Ok(())
    }

    /// Who is suspected, and what everybody's threads do.
    fn hanging(&mut self, suspect: Party) -> String {
        let parties =
            [Party::Core, Party::Program(0), Party::Program(1), Party::Program(2), Party::Hostile];
        let mut text = format!("{suspect:?} ({}) hangs\n", self.process(suspect).name());
        for party in parties {
            let process = self.process(party);
            let (name, pid) = (process.name().to_owned(), process.pid());
            text += &threads::describe(&name, pid);
        }
        text + &self.core.quote() + "\n" + &self.process(suspect).quote()
    }

    /// Waits until all programs have ended, and checks how.
    fn end(mut self) -> Result<Outcome> {
        for n in 0..PROGRAMS {
            let ended = self.programs[n].process.wait(self.patience);
            let ended = ended.with_context(|| self.hanging(Party::Program(n)))?;
            ensure!(ended.success(), "{ended}\n{}", self.programs[n].process.quote());
            self.account(n)?;
        }
        let ended = self.hostile.wait(self.patience);
        ensure!(ended?.success(), "{}", self.hostile.quote());
        self.scene.stop(&mut self.core, self.patience)?;
        self.counted.add_to(&mut self.outcome);
        Ok(self.outcome)
    }
}

/// `command` with monotonic clocks that are ahead by so many seconds, in further namespaces.
fn at(clock_s: i64, more: &[&str], command: &Command) -> Command {
    let (monotonic, boot) = (format!("--monotonic={clock_s}"), format!("--boottime={clock_s}"));
    let wrapper = ["unshare", "--time", &monotonic, &boot];
    Scene::wrapped(wrapper.into_iter().chain(more.iter().copied()), command)
}

/// Days ahead, or as far behind as a clock that has just started can be.
fn clock_offset_s(random: &mut Random) -> Result<i64> {
    let uptime = std::fs::read_to_string("/proc/uptime")?;
    let uptime: f64 = uptime.split(' ').next().unwrap_or_default().parse()?;
    Ok(match random.below(4) {
        0 => -(random.below(uptime as u64 + 1) as i64),
        1 => 1 + random.below(5) as i64,
        2 => random.below(86_400) as i64,
        _ => random.below(365 * 86_400) as i64,
    })
}

fn start_core(
    scene: &Scene,
    means: Means,
    policies: &[(PathBuf, Option<PathBuf>)],
    config: &str,
    choice: u64,
    clock_s: i64,
) -> Result<Process> {
    let (policy, policy_config) = &policies[choice as usize % policies.len()];
    let mut arguments = vec!["--config", config];
    let policy_config = policy_config.as_ref().map(|file| file.to_string_lossy().into_owned());
    if let Some(file) = &policy_config {
        arguments.extend(["--policy-config", file]);
    }
    let mut command = scene.core_command(policy, &arguments)?;
    let state = scene.state_dir().to_string_lossy().into_owned();
    let mount = format!("mount -t tmpfs -o {SPACE} tally \"$0\" && exec \"$@\"");
    let mounted: &[&str] = match means.mounts {
        true => &["--mount", "sh", "-c", &mount, &state],
        false => &[],
    };
    if clock_s != 0 {
        command = at(clock_s, mounted, &command);
    } else if means.mounts {
        command =
            Scene::wrapped(std::iter::once("unshare").chain(mounted.iter().copied()), &command);
    }
    scene.start("core", command)
}

fn start_hostile(scene: &Scene) -> Result<Process> {
    let mut command = scene.program("tally-chaos-hostile")?;
    command.arg("--socket").arg(scene.socket()).arg("--name=hostile");
    scene.start("hostile", command)
}

fn ask(scene: &Scene, request: &Value, patience: Duration) -> Result<Value> {
    let stream = UnixStream::connect(scene.admin_socket())?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    crate::admin::send(&stream, request)?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).with_context(|| format!("after {request}"))?;
    let mut answer: Value =
        serde_json::from_str(&line).with_context(|| format!("after {request}"))?;
    match answer.get_mut("ok") {
        Some(ok) => Ok(ok.take()),
        None => bail!("{request} -> {answer}"),
    }
}

fn await_core(scene: &Scene, patience: Duration) -> Result<()> {
    wait_until("waiting for the core", patience, || {
        Ok(ask(scene, &json!({"cmd": "status"}), patience).ok().map(drop))
    })
}

/// Lowers the soft limit, which its owner may raise again; gives what both were.
fn lower(pid: Pid, resource: Resource, limit: u64) -> Result<Rlimit> {
    let name = match resource {
        Resource::Nofile => "Max open files",
        _ => "Max file size",
    };
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", pid.as_raw_pid()))?;
    let line = limits.lines().find_map(|line| line.strip_prefix(name)).context(name)?;
    let mut numbers = line.split_whitespace().map(|word| word.parse::<u64>().ok());
    let (current, maximum) = (numbers.next().context(name)?, numbers.next().context(name)?);
    prlimit(Some(pid), resource, Rlimit { current: Some(limit), maximum })?;
    Ok(Rlimit { current, maximum })
}

/// Writes until there is no space left.
fn fill(file: &std::path::Path) -> Result<()> {
    let mut file = std::fs::File::create(file)?;
    let block = [0x55; 4096];
    for _ in 0..4096 {
        match file.write_all(&block) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
    bail!("16 MiB fit into a file system that was to be small")
}
