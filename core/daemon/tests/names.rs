//! What clients call themselves and their kernels: whoever reads a status, a log or a file of profiles sees no control
//! characters and no forged lines. The attack of the audit's finding 10.

mod common;

use common::{Client, Core, eventually, hello, policy};
use serde_json::{Value, json};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::text::printable;
use tally_ipc::wire;

/// Sets a terminal's title, colours, erases a line, begins another and turns the direction of writing.
const EVIL: &str =
    "\u{1b}]0;pwned\u{7}\u{1b}[31mRED\u{1b}[2K\r\nINFO tally_core: forged\u{202e}\u{9b}1m";

/// Every text in it, keys included.
fn texts(value: &Value, all: &mut Vec<String>) {
    match value {
        Value::String(text) => all.push(text.clone()),
        Value::Array(items) => items.iter().for_each(|item| texts(item, all)),
        Value::Object(fields) => fields.iter().for_each(|(key, item)| {
            all.push(key.clone());
            texts(item, all);
        }),
        _ => {}
    }
}

fn see_that_printable(what: &str, value: &Value) {
    let mut all = Vec::new();
    texts(value, &mut all);
    assert!(all.iter().any(|text| text.contains("RED")), "{what} names it: {value}");
    for text in all {
        assert_eq!(printable(text.clone()), text, "in {what}");
    }
}

#[test]
fn names_of_clients_and_kernels_are_cleaned_wherever_they_are_shown_or_kept() {
    let mut core = Core::start("", &["--policy", policy("fifo").to_str().unwrap()]);
    let mut evil = hello(EVIL, false);
    evil.labels = vec![(EVIL.into(), EVIL.into())];
    let mut client = Client::register(&core.socket, &evil).unwrap();
    client.region.kernels[0].publish(EVIL.as_bytes(), 7);
    client.region.kernel_count.store(1, SeqCst);
    let report = &client.region.report;
    report.device_uuid[0].store(0x1111, SeqCst);
    report.sm_count.store(7, SeqCst);
    for _ in 0..20 {
        client.launch();
    }
    // A program that is not governed, and one that is refused.
    let stream = UnixStream::connect(&core.socket).unwrap();
    let notice = wire::Notice { name: EVIL.into(), reason: EVIL.into() };
    wire::send(rustix::fd::AsFd::as_fd(&stream), &notice.encode(), &[]).unwrap();
    eventually("it is shown", || {
        core.status()["ungoverned"].to_string().contains("RED")
            && core.status()["kernels"].to_string().contains("RED")
    });
    let shown = core.ask(json!({"cmd": "profiles_show", "kernels": 100}));
    see_that_printable("the profiles", &shown);
    drop(client);
    eventually("it has left", || core.status()["departed"].to_string().contains("RED"));
    see_that_printable("the status", &core.status());
    core.signal(rustix::process::Signal::TERM);
    assert!(core.wait().success());
    let log = core.log();
    assert!(log.contains("client registered"), "{log}");
    let forged =
        log.lines().filter(|line| line.trim_start().starts_with("INFO tally_core: forged"));
    assert_eq!(forged.count(), 0, "{log}");
    assert!(
        !log.contains('\u{1b}') && !log.contains('\u{202e}') && !log.contains('\u{9b}'),
        "{log}"
    );
    let mut kept = 0;
    for file in walk(&core.dir.path().join("state")) {
        let text = String::from_utf8_lossy(&std::fs::read(&file).unwrap()).into_owned();
        kept += usize::from(text.contains("RED"));
        let is_clean = |line: &str| {
            serde_json::from_str(line).is_ok_and(|line: Value| {
                let mut all = Vec::new();
                texts(&line, &mut all);
                all.iter().all(|text| printable(text.clone()) == *text)
            })
        };
        assert!(text.lines().all(is_clean), "{}: {text}", file.display());
    }
    assert_eq!(kept, 1, "the kernel's profile is kept");
}

fn walk(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .flat_map(
            |entry| if entry.path().is_dir() { walk(&entry.path()) } else { vec![entry.path()] },
        )
        .collect()
}
