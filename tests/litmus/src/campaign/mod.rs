//! Runs programs bare, then as clients of a core beside another client, and compares.

pub mod drive;
mod extra;
mod mps;
mod report;
pub mod setups;

use crate::model::{self, Values};
use crate::program::{Device, Environment, Program};
use anyhow::{Result, ensure};
use drive::{Driver, Outcome, difference};
pub use report::{Finding, Report, Row};
use setups::Setup;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use tally_harness::{Artefacts, Class, Process, Scene};

/// Programs that one process runs, at most.
const BATCH: usize = 100;
/// How long programs that misbehaved may run bare again, in all.
const CONFIRM_MAX: Duration = Duration::from_secs(60);
/// The core's own settings: a window in which nothing ends lets another launch in sooner, for
/// programs here wait for one another all the time.
const CORE: &str = "[engine]\nwindow_stall_ms = 25\n[rewrite]\nenabled = true\n";

/// What a campaign runs, and where.
pub struct Plan {
    pub programs: Vec<Program>,
    /// Whether the scenarios run, too, under all setups.
    pub scenarios: bool,
    /// Pairs of images, in all.
    pub pairs: u64,
    pub setups: Vec<Setup>,
    /// Every program under all setups, else each under one of them.
    pub all_setups: bool,
    /// How often each runs bare first.
    pub bare_runs: u32,
    /// They run beside another process's kernels then.
    pub is_bare_beside: bool,
    /// How often what misbehaved under Tally runs bare again.
    pub confirm_runs: u32,
    pub device: tally_harness::Device,
    /// Seconds that a program may take.
    pub limit_s: f64,
    pub bare_limit_s: f64,
    pub until: Instant,
    /// Ends a setup early after so many hangs.
    pub hangs_max: usize,
    /// Setups at one time; bare, batches of programs.
    pub workers: usize,
    pub seed: u64,
    /// Percent of the loops that kernels are to spin.
    pub work_percent: u32,
    /// Transform kernels of closed libraries, too, and load kernels eagerly whatever programs say.
    pub vendor: bool,
}

/// Bare, and then under each setup.
///
/// # Errors
/// If processes cannot be started at all.
pub fn run(artefacts: &Artefacts, plan: &Plan) -> Result<Report> {
    let began = Instant::now();
    let bare = run_bare(artefacts, plan)?;
    eprintln!("{}", bare.row.summary());
    let next = AtomicUsize::new(0);
    let rows: Mutex<BTreeMap<usize, Row>> = Mutex::default();
    let failure: Mutex<Option<anyhow::Error>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..plan.workers {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, SeqCst);
                    let Some(setup) = plan.setups.get(at) else { return };
                    match run_setup(artefacts, plan, at, setup, &bare) {
                        Ok(row) => {
                            eprintln!("{}", row.summary());
                            crate::run::lock(&rows).insert(at, row);
                        }
                        Err(why) => {
                            *crate::run::lock(&failure) = Some(why.context(setup.name));
                            return;
                        }
                    }
                }
            });
        }
    });
    if let Some(why) = failure.into_inner().unwrap_or_default() {
        return Err(why);
    }
    let mut rows: Vec<Row> = rows.into_inner().unwrap_or_default().into_values().collect();
    if plan.confirm_runs > 0 {
        confirm(artefacts, plan, &mut rows)?;
    }
    Ok(Report { bare: bare.row, rows, seconds: began.elapsed().as_secs_f64() })
}

/// How programs ended without Tally.
struct Bare {
    row: Row,
    /// Which programs ended as they must.
    ends_well: Vec<bool>,
}

/// Programs by environment, in batches; indices into the list.
fn batches(programs: &[Program], wanted: impl Fn(usize) -> bool) -> Vec<Vec<usize>> {
    let mut by_environment: BTreeMap<Environment, Vec<usize>> = BTreeMap::new();
    for (i, program) in programs.iter().enumerate().filter(|(i, _)| wanted(*i)) {
        by_environment.entry(program.environment).or_default().push(i);
    }
    by_environment.values().flat_map(|all| all.chunks(BATCH).map(<[usize]>::to_vec)).collect()
}

fn sms_of(device: tally_harness::Device, sms: u32) -> tally_harness::Device {
    match device {
        tally_harness::Device::Software { .. } => tally_harness::Device::Software { sms },
        other => other,
    }
}

fn run_bare(artefacts: &Artefacts, plan: &Plan) -> Result<Bare> {
    let mut row = Row::new("bare", "no policy");
    let mut ends_well = vec![true; plan.programs.len()];
    let until = plan.bare_until();
    let plain = |command: Command| Ok(command);
    for _ in 0..plan.bare_runs {
        let batches = Mutex::new(batches(&plan.programs, |i| ends_well[i]));
        let take = || crate::run::lock(&batches).pop();
        let work = || -> Result<Vec<(usize, Outcome, Option<Device>)>> {
            let scene = Scene::new(artefacts, plan.device)?;
            let load = plan.is_bare_beside.then(|| bare_load(plan, &scene, &plain)).transpose()?;
            let driver = plan.driver(&scene);
            // Those that hang bare are no fault of anybody's: all others are to be tried.
            let (limit_s, hangs_left) = (plan.bare_limit_s, usize::MAX.into());
            let driver = Driver { limit_s, hangs_left, until, ..driver };
            let mut found = Vec::new();
            while let Some(batch) = take() {
                let programs: Vec<&Program> = batch.iter().map(|&i| &plan.programs[i]).collect();
                let (outcomes, device) = driver.run(&programs, &plain, &mut |_| {})?;
                found.extend(batch.into_iter().zip(outcomes).map(|(i, o)| (i, o, device)));
            }
            load.map(|mut load| load.kill()).transpose()?;
            Ok(found)
        };
        let found: Vec<Result<Vec<_>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..plan.workers.max(1)).map(|_| scope.spawn(work)).collect();
            let join = |t: std::thread::ScopedJoinHandle<'_, _>| {
                t.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")))
            };
            threads.into_iter().map(join).collect()
        });
        let mut all: Vec<_> = found.into_iter().collect::<Result<Vec<_>>>()?.concat();
        all.sort_by_key(|(i, ..)| *i);
        for (i, outcome, device) in all {
            let expected = device.and_then(|device| expected(&plan.programs[i], device));
            ends_well[i] = row.judge(&plan.programs[i], expected.as_ref(), outcome);
        }
    }
    if plan.scenarios {
        let scene = Scene::new(artefacts, plan.device)?;
        extra::scenarios(plan, &scene, &plain, &mut row)?;
    }
    Ok(Bare { row, ends_well })
}

/// What a program must end with.
fn expected(program: &Program, device: Device) -> Option<Values> {
    model::check(program, device).ok()
}

impl Plan {
    /// Bare runs take a third of the time at most: what does not run bare in it does not run under Tally.
    fn bare_until(&self) -> Instant {
        let left = self.until.saturating_duration_since(Instant::now());
        if self.setups.is_empty() { self.until } else { self.until - left * 2 / 3 }
    }

    fn driver<'a>(&self, scene: &'a Scene) -> Driver<'a> {
        Driver {
            scene,
            limit_s: self.limit_s,
            work_percent: self.work_percent,
            until: self.until,
            stops_at_hang: false,
            hangs_left: self.hangs_max.into(),
        }
    }

    fn core_config(&self, setup: &Setup) -> String {
        let gpu = usize::from(self.device == tally_harness::Device::Cuda);
        let widths = setup.reserve_sms[gpu];
        let vendor = if self.vendor { "vendor_libraries = true\n" } else { "" };
        // With the default, too.
        let put_off = setup.policy != "tally-priority";
        format!("{CORE}{vendor}[sm_limits]\nreserve_sms = {widths:?}\nput_off_joins = {put_off}\n")
    }
}

fn run_setup(
    artefacts: &Artefacts,
    plan: &Plan,
    at: usize,
    setup: &Setup,
    bare: &Bare,
) -> Result<Row> {
    let scene = Scene::new(artefacts, sms_of(plan.device, setup.sms))?;
    let mut core = start_core(artefacts, plan, setup, &scene)?;
    let mut load = start_load(plan, setup, &scene)?;
    let is_wanted =
        |i: usize| bare.ends_well[i] && (plan.all_setups || i % plan.setups.len() == at);
    let govern = |command: Command| scene.governed(setup.class, "litmus", &command);
    let is_gpu = plan.device == tally_harness::Device::Cuda;
    let driver = Driver { stops_at_hang: is_gpu, ..plan.driver(&scene) };
    let mut row = Row::new(setup.name, setup.policy);
    row.mode = setup.mode(plan.device).into();
    row.class = setup.class_name().into();
    let mut left: VecDeque<Vec<usize>> = batches(&plan.programs, is_wanted).into();
    while let Some(mut batch) = left.pop_front() {
        let programs: Vec<&Program> = batch.iter().map(|&i| &plan.programs[i]).collect();
        let mut pids = Vec::new();
        let (outcomes, device) = driver.run(&programs, &govern, &mut |ended| {
            pids.extend_from_slice(ended);
            // Only the last 64 clients are kept.
            if pids.len() > 40 {
                row.count_mechanisms(&scene, &std::mem::take(&mut pids));
            }
        })?;
        row.count_mechanisms(&scene, &pids);
        let later = batch.split_off(outcomes.len());
        for (&i, outcome) in batch.iter().zip(outcomes) {
            // The device of a setup may be another than the bare one, and its values too.
            let expected = device.and_then(|device| expected(&plan.programs[i], device));
            row.judge(&plan.programs[i], expected.as_ref(), outcome);
        }
        if core.poll()?.is_some() {
            row.findings.push(Finding::of_core(format!("the core ended\n{}", core.quote())));
            core = start_core(artefacts, plan, setup, &scene)?;
        }
        if !later.is_empty() {
            left.push_front(later);
            // All that shared the GPU with what was ended begins anew.
            load.kill()?;
            scene.stop(&mut core, Duration::from_secs(30))?;
            core = start_core(artefacts, plan, setup, &scene)?;
            load = start_load(plan, setup, &scene)?;
        }
    }
    if plan.scenarios {
        extra::scenarios(plan, &scene, &govern, &mut row)?;
    }
    extra::pairs(plan, at, &scene, &govern, &mut row)?;
    if load.poll()?.is_some() {
        row.findings.push(Finding::of_core(format!("the other client ended\n{}", load.quote())));
    }
    row.count_policy_faults(&scene);
    row.expect_mechanisms(setup.tries);
    load.kill()?;
    scene.stop(&mut core, Duration::from_secs(30))?;
    Ok(row)
}

/// The other client, which keeps the scheduler busy.
fn start_load(plan: &Plan, setup: &Setup, scene: &Scene) -> Result<Process> {
    let class = match setup.class {
        Class::High => Class::BestEffort,
        Class::BestEffort => Class::High,
    };
    let mut load = scene.program("tally-litmus")?;
    load.args(["load", if class == Class::High { "--high" } else { "--best-effort" }]);
    load.arg(format!("--work-percent={}", plan.work_percent));
    let mut load = scene.start("load", scene.governed(class, "load", &load)?)?;
    ensure!(load.hear(Duration::from_secs(60))?["load"] == true, "the other client does not start");
    Ok(load)
}

/// Programs that misbehaved under Tally run bare again, so often, the second half beside another process's kernels:
/// what does so bare as well, on a GPU whose rules the model does not all know, is told apart. What was shared through
/// MPS runs through MPS here, too.
fn confirm(artefacts: &Artefacts, plan: &Plan, rows: &mut [Row]) -> Result<()> {
    for is_mps in [false, true] {
        let (mine, others): (Vec<_>, Vec<_>) =
            rows.iter_mut().partition(|row| (row.mode == "mps") == is_mps);
        drop(others);
        if mine.iter().all(|row| row.programs().is_empty()) {
            continue;
        }
        let scene = Scene::new(artefacts, plan.device)?;
        let daemon = is_mps.then(|| mps::Daemon::start(scene.dir())).transpose()?;
        let plain = |mut command: Command| {
            daemon.iter().for_each(|daemon| daemon.reach(&mut command));
            Ok(command)
        };
        confirm_rows(plan, &scene, &plain, mine)?;
    }
    Ok(())
}

fn confirm_rows(
    plan: &Plan,
    scene: &Scene,
    plain: &dyn Fn(Command) -> Result<Command>,
    mut rows: Vec<&mut Row>,
) -> Result<()> {
    let driver = plan.driver(scene);
    let until = Instant::now() + CONFIRM_MAX;
    let driver = Driver { limit_s: plan.bare_limit_s, stops_at_hang: true, until, ..driver };
    let named = |rows: &[&mut Row]| -> BTreeSet<String> {
        rows.iter().flat_map(|row| row.programs()).collect()
    };
    let mut names = named(&rows);
    for beside_load in [false, true] {
        let load = (beside_load && !names.is_empty())
            .then(|| bare_load(plan, scene, plain))
            .transpose()?;
        let mut seen = BTreeSet::new();
        for program in &plan.programs {
            if !names.contains(&program.name) || !seen.insert(&program.name) {
                continue;
            }
            let runs = vec![program; plan.confirm_runs.div_ceil(2) as usize];
            let (outcomes, device) = driver.run(&runs, plain, &mut |_| {})?;
            let expected = device.and_then(|device| expected(program, device));
            let mut bare = Row::new("bare", "no policy");
            let ran = outcomes.into_iter().filter(|outcome| *outcome != Outcome::NotRun);
            let judge = |outcome| bare.judge(program, expected.as_ref(), outcome);
            if !ran.map(judge).fold(true, |all, is_good| all & is_good) {
                rows.iter_mut().for_each(|row| row.excuse(&program.name));
            }
        }
        names = named(&rows);
        load.map(|mut load| load.kill()).transpose()?;
    }
    Ok(())
}

/// The other client, as a program of nobody's.
fn bare_load(
    plan: &Plan,
    scene: &Scene,
    plain: &dyn Fn(Command) -> Result<Command>,
) -> Result<Process> {
    let mut load = scene.program("tally-litmus")?;
    load.args(["load", "--high"]).arg(format!("--work-percent={}", plan.work_percent));
    let mut load = scene.start("load", plain(load)?)?;
    ensure!(load.hear(Duration::from_secs(60))?["load"] == true, "the other client does not start");
    Ok(load)
}

fn start_core(artefacts: &Artefacts, plan: &Plan, setup: &Setup, scene: &Scene) -> Result<Process> {
    let policy = match setup.is_test_policy {
        true => artefacts.test_policy(setup.policy)?,
        false => artefacts.policy(setup.policy)?,
    };
    let write = |name: &str, text: String| -> Result<String> {
        let path = scene.dir().join(name);
        std::fs::write(&path, text)?;
        Ok(path.to_string_lossy().into_owned())
    };
    let seed = plan.seed.max(1).to_string();
    let policy_config = write("policy.toml", setup.policy_config.replace("SEED", &seed))?;
    let config = write("core.toml", plan.core_config(setup))?;
    let mode = setup.mode(plan.device);
    let arguments = ["--sharing", mode, "--config", &config, "--policy-config", &policy_config];
    let core = scene.core(&policy, &arguments)?;
    let in_force = scene.status()?.0["sharing"]["in_force"].clone();
    ensure!(in_force == mode, "the sharing mode is {in_force}, not {mode}");
    Ok(core)
}

/// Where two runs of a program differ.
fn differs(expected: Option<&Values>, got: &Values) -> Option<String> {
    match expected {
        Some(expected) => difference(expected, got),
        None => Some("nobody knows what it must end with here".into()),
    }
}
