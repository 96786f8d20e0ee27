//! A C program on the device; two of them sharing it; and one of two killed,
//! again and again.

mod common;

use common::{Device, kernels, output, wait};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Compiles `client.c` and links it against the device.
fn client(device: &Device) -> PathBuf {
    let source = kernels().parent().unwrap().join("client.c");
    let program = device.dir.path().join("client");
    let compiled = output(
        Command::new("cc")
            .args(["-O1", "-Wall", "-Werror", "-o"])
            .arg(&program)
            .arg(source)
            .arg("-L")
            .arg(device.dir.path())
            .arg("-lcuda"),
        "cc",
    );
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    program
}

fn run(device: &Device, program: &PathBuf, mode: &str, blocks: u32, launches: u32) -> Command {
    let mut command = Command::new(program);
    command.arg(kernels().join("basic.ptx")).arg(mode);
    command.args([blocks.to_string(), launches.to_string()]);
    device.on(&command)
}

/// Starts a client and waits until it has the device.
fn start(mut command: Command) -> Child {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    child
}

#[test]
fn a_c_program_runs_and_prints_nothing_else() {
    let device = Device::new(2);
    let program = client(&device);
    let run = output(&mut run(&device, &program, "work", 64, 20), "client");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert_eq!(String::from_utf8_lossy(&run.stdout), "ready\ndone on 2 SMs\n");
    assert!(run.stderr.is_empty());
    let linked = output(Command::new("readelf").arg("-d").arg(&program), "readelf");
    if linked.status.success() {
        let text = String::from_utf8_lossy(&linked.stdout).into_owned();
        assert!(text.contains("[libcuda.so.1]"), "the library's SONAME: {text}");
    }
}

#[test]
fn three_processes_share_the_sms() {
    for sms in [1, 2, 5] {
        let device = Device::new(sms);
        let program = client(&device);
        let mut children: Vec<Child> = [(50, 60), (3, 300), (1, 500)]
            .map(|(blocks, launches)| start(run(&device, &program, "work", blocks, launches)))
            .into();
        for child in &mut children {
            assert!(wait(child, "a client that shares").success());
        }
    }
}

#[test]
fn a_killed_process_does_not_stop_the_others() {
    let device = Device::new(2);
    let program = client(&device);
    let mut in_the_middle = 0;
    for round in 0..30 {
        // One with long queues of short kernels, one with many blocks: killed
        // while holding SMs, waiting, or in the middle of an update.
        let even = round % 2 == 0;
        let (victim_blocks, blocks, launches) = if even { (2, 40, 3000) } else { (200, 3, 9000) };
        let mut victim = start(run(&device, &program, "work", victim_blocks, 1_000_000));
        let mut other = start(run(&device, &program, "work", blocks, launches));
        std::thread::sleep(Duration::from_micros(round * 1_337 % 40_000));
        in_the_middle += u32::from(other.try_wait().unwrap().is_none());
        victim.kill().unwrap();
        // Not waited for yet: a zombie must not count as alive.
        let status = wait(&mut other, "the process beside a killed one");
        assert!(status.success(), "round {round}: {status}");
        victim.wait().unwrap();
    }
    assert!(in_the_middle > 5, "only {in_the_middle} kills fell where they hurt");
    // And the device is as good as new.
    let after = output(&mut run(&device, &program, "work", 16, 50), "client after");
    assert!(after.status.success(), "{}", String::from_utf8_lossy(&after.stderr));
}

#[test]
fn sms_of_a_killed_process_are_taken_back() {
    let device = Device::new(2);
    let program = client(&device);
    for held in [2, 100] {
        let mut holder = start(run(&device, &program, "hold", held, 0));
        let mut other = start(run(&device, &program, "work", 8, 50));
        std::thread::sleep(Duration::from_millis(60));
        assert!(other.try_wait().unwrap().is_none(), "all SMs are taken, by blocks that never end");
        holder.kill().unwrap();
        assert!(wait(&mut other, "a client behind a killed one").success());
        holder.wait().unwrap();
    }
}
