//! Programs on the software device, without Tally: the device, the model of it and the programs
//! agree.

use anyhow::{Result, ensure};
use std::time::{Duration, Instant};
use tally_harness::{Artefacts, Device, Scene};
use tally_litmus::build::Builder;
use tally_litmus::campaign::drive::{Driver, Outcome, difference};
use tally_litmus::generate::{self, DEVICE};
use tally_litmus::model;
use tally_litmus::program::{Environment, Kernel, Op, Program, StreamKind, Target, Work};

/// How long a program that hangs may do so, where one must.
const HANGS_S: f64 = 1.5;

fn scene() -> Result<Scene> {
    Scene::new(&Artefacts::locate()?, Device::Software { sms: DEVICE.sms })
}

fn driver(scene: &Scene, limit_s: f64) -> Driver<'_> {
    let until = Instant::now() + Duration::from_secs(3_600);
    Driver {
        scene,
        limit_s,
        work_percent: 100,
        until,
        stops_at_hang: false,
        hangs_left: usize::MAX.into(),
    }
}

/// How they end, by environment.
fn run(programs: &[Program], limit_s: f64) -> Result<Vec<(String, Outcome)>> {
    let scene = scene()?;
    let mut ended = Vec::new();
    let mut environments: Vec<Environment> = programs.iter().map(|p| p.environment).collect();
    environments.sort();
    environments.dedup();
    for environment in environments {
        let of: Vec<&Program> = programs.iter().filter(|p| p.environment == environment).collect();
        let (outcomes, _) =
            driver(&scene, limit_s).run(&of, &|command| Ok(command), &mut |_| {})?;
        ended.extend(of.iter().map(|p| p.name.clone()).zip(outcomes));
    }
    Ok(ended)
}

fn all_as_modelled(programs: &[Program]) -> Result<()> {
    let mut wrong = Vec::new();
    for (name, outcome) in run(programs, 60.0)? {
        let program = programs.iter().find(|p| p.name == name).expect("one of them");
        let expected = model::check(program, DEVICE).map_err(anyhow::Error::msg)?;
        match outcome {
            Outcome::Ended(got) => {
                wrong.extend(difference(&expected, &got).map(|d| format!("{name}: {d}")))
            }
            other => wrong.push(format!("{name}: {other:?}\n{program}")),
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn named_programs_end_with_the_values_of_the_model() -> Result<()> {
    all_as_modelled(&tally_litmus::named::all())
}

#[test]
fn made_programs_end_with_the_values_of_the_model() -> Result<()> {
    let programs: Vec<Program> = (10_000..10_400).map(generate::program).collect();
    all_as_modelled(&programs)
}

/// A poll, something behind or beside it, and what it waits for.
fn stuck(
    name: &str,
    environment: Environment,
    kind: StreamKind,
    between: fn(&mut Builder, usize),
) -> Program {
    let mut b = Builder::new(name).environment(environment);
    let (go, one, other) = (b.device(1), b.stream(kind), b.stream(kind));
    b.launch(0, one, Kernel::Poll { word: go, value: 1 });
    between(&mut b, one);
    b.launch(0, other, Kernel::Set { word: go, value: 1 });
    b.op(0, Op::Sync { target: Target::Context(0), asking: false });
    b.program
}

#[test]
fn what_the_model_refuses_for_a_reason_hangs() -> Result<()> {
    let one_queue = Environment { connections: 1, ..Environment::default() };
    let usual = Environment::default();
    let programs = [
        stuck("a timed record", one_queue, StreamKind::NonBlocking, |b, on| {
            let event = b.event(true);
            b.op(0, Op::Record { event, on });
        }),
        stuck("a stream write", one_queue, StreamKind::NonBlocking, |b, on| {
            let word = b.host();
            b.submit(0, on, Work::Write { word, value: 1 });
        }),
        stuck("a record in the legacy stream", usual, StreamKind::Blocking, |b, _| {
            let (event, on) = (b.event(false), b.stream(StreamKind::Legacy));
            b.op(0, Op::Record { event, on });
        }),
        stuck("memory freed", usual, StreamKind::NonBlocking, |b, _| {
            b.op(0, Op::Free { context: 0 })
        }),
        stuck("no room", usual, StreamKind::NonBlocking, |b, _| {
            for _ in 0..DEVICE.sms {
                let (on, word) = (b.stream(StreamKind::NonBlocking), b.device(1));
                b.launch(0, on, Kernel::Poll { word, value: 1 });
            }
        }),
    ];
    for program in &programs {
        ensure!(model::check(program, DEVICE).is_err(), "{} is taken", program.name);
    }
    for (name, outcome) in run(&programs, HANGS_S)? {
        ensure!(matches!(outcome, Outcome::Hung(_)), "{name}: {outcome:?}");
    }
    Ok(())
}

/// After one that hangs the others run, and it is the one that is blamed.
#[test]
fn a_hang_is_one_programs() -> Result<()> {
    let usual = Environment::default();
    let hangs =
        stuck("hangs", usual, StreamKind::NonBlocking, |b, _| b.op(0, Op::Free { context: 0 }));
    let mut programs: Vec<Program> = (20_000..20_400)
        .map(generate::program)
        .filter(|p| p.environment == usual)
        .take(40)
        .collect();
    programs.insert(17, hangs);
    let ended = run(&programs, 10.0)?;
    ensure!(ended.len() == 41);
    for (at, (name, outcome)) in ended.iter().enumerate() {
        match outcome {
            Outcome::Hung(threads) => {
                ensure!(
                    at == 17 && threads.join("").contains("free memory"),
                    "{name}: {threads:?}"
                );
            }
            Outcome::Ended(_) => ensure!(at != 17),
            other => anyhow::bail!("{name}: {other:?}"),
        }
    }
    Ok(())
}

/// A device that loses the last block of a kernel is found out.
#[test]
fn a_lost_block_shows() -> Result<()> {
    let scene = scene()?;
    let mut b = Builder::new("lost");
    let (on, words) = (b.stream(StreamKind::NonBlocking), b.device(16));
    b.launch(0, on, Kernel::Each { word: words, value: 1, blocks: 16, loops: 0 });
    let expected = model::check(&b.program, DEVICE).map_err(anyhow::Error::msg)?;
    for faulty in [false, true] {
        let govern = |mut command: std::process::Command| {
            if faulty {
                command.env("TALLY_SOFTCUDA_FAULT", "each:8");
            }
            Ok(command)
        };
        let (outcomes, _) = driver(&scene, 20.0).run(&[&b.program], &govern, &mut |_| {})?;
        let Outcome::Ended(got) = &outcomes[0] else { anyhow::bail!("{outcomes:?}") };
        ensure!(difference(&expected, got).is_some() == faulty, "{got:?}");
    }
    Ok(())
}

#[test]
fn scenarios_and_pairs_are_right() -> Result<()> {
    let scene = scene()?;
    for arguments in [
        &["pairs", "--pairs=200"][..],
        &["scenario", "cap"],
        &["scenario", "prim"],
        &["scenario", "cancel"],
        &["scenario", "torn"],
        &["scenario", "looks"],
    ] {
        let mut command = scene.program("tally-litmus")?;
        command.args(arguments);
        scene.start("extra", command)?.finish(Duration::from_secs(120))?;
    }
    Ok(())
}
