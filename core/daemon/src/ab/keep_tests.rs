use super::*;
use tally_ab::report::ArmSource;
use tally_ab::{Experiment, Metric, Plan};

fn config(folder: &Path) -> Config {
    let mut config = Config::default();
    config.ab.directory = Some(folder.join("ab"));
    config
}

fn report(ended: bool) -> Report {
    let mut experiment = Experiment::new(Plan::of(Metric::HpP99), 0).unwrap();
    if ended {
        experiment.stop(7_000, Reason::Stopped, "enough");
    }
    Report::new(&experiment, &[ArmSource::default(), ArmSource::default()], 5_000_000_000, true)
}

fn open(folder: &Path, socket: &str) -> (Keep, Option<Report>) {
    Keep::open(&config(folder), Path::new(socket))
}

#[test]
fn the_next_core_at_the_same_socket_finds_the_report() {
    let folder = tempfile::tempdir().unwrap();
    let (keep, none) = open(folder.path(), "/run/tally/core.sock");
    assert!(none.is_none());
    keep.write(&report(true)).unwrap();
    let (_, found) = open(folder.path(), "/run/tally/core.sock");
    assert_eq!(found.unwrap(), report(true));
    // Another GPU's core does not.
    assert!(open(folder.path(), "/run/tally-core.sock").1.is_none());
    let mut off = config(folder.path());
    off.ab.keep = false;
    assert!(Keep::open(&off, Path::new("/run/tally/core.sock")).1.is_none());
}

#[test]
fn a_report_without_an_end_was_interrupted_and_is_so_for_good() {
    let folder = tempfile::tempdir().unwrap();
    open(folder.path(), "/s").0.write(&report(false)).unwrap();
    for _ in 0..2 {
        let found = open(folder.path(), "/s").1.unwrap();
        let ended = found.ended.unwrap();
        assert_eq!((ended.reason, ended.after_ns), (Reason::Interrupted, 5_000_000_000));
        assert!(ended.message.contains("the core died"), "{}", ended.message);
    }
}

#[test]
fn what_cannot_be_used_is_no_report_and_the_next_one_takes_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let (keep, _) = open(folder.path(), "/s");
    keep.write(&report(true)).unwrap();
    let file = keep.file.clone().unwrap();
    let whole = std::fs::read(&file).unwrap();
    for damaged in [&whole[..whole.len() / 2], b"", b"{}", br#"{"tally_ab":9}"#] {
        std::fs::write(&file, damaged).unwrap();
        assert!(open(folder.path(), "/s").1.is_none());
    }
    // Of a later version.
    let later = String::from_utf8(whole).unwrap().replace("\"tally_ab\":1", "\"tally_ab\":2");
    std::fs::write(&file, &later).unwrap();
    assert!(keep.read(&file).unwrap_err().contains("expected 1"));
    std::fs::File::create(&file).unwrap().set_len(BYTES_MAX as u64 + 1).unwrap();
    assert!(keep.read(&file).unwrap_err().contains("more than"));
    keep.write(&report(true)).unwrap();
    assert!(open(folder.path(), "/s").1.is_some());
}

#[test]
fn a_folder_holds_so_many_reports_and_the_oldest_go() {
    let folder = tempfile::tempdir().unwrap();
    let touch = |n: u64| {
        let path = folder.path().join(name(&format!("/{n}")));
        let file = std::fs::File::create(&path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(n)).unwrap();
        path
    };
    let paths: Vec<PathBuf> = (0..5).map(touch).collect();
    let others = ["note.txt", "results.json", "run-0123456789abcdeg.json"];
    for other in others {
        let file = std::fs::File::create(folder.path().join(other)).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    }
    thin_out(folder.path(), 3);
    let left: Vec<bool> = paths.iter().map(|path| path.exists()).collect();
    assert_eq!(left, [false, false, true, true, true]);
    assert!(others.iter().all(|other| folder.path().join(other).exists()));
}

#[test]
fn names_that_look_alike_are_told_apart() {
    assert_ne!(name("/run/a/b"), name("/run/a-b"));
    assert!(name("/run/tally/core.sock").starts_with("run-tally-core.sock-"));
    assert!(name(&"x".repeat(4_000)).len() < 128);
}
