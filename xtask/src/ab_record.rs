//! `docs/results/ab.json`: the figures of `cargo xtask test ab` and `cargo xtask test traps`, each a part of its own,
//! and the passages of `docs/ab.md` that they make.

use crate::repository;
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Parts of the record, each with a passage of the document.
pub const PARTS: [&str; 2] = ["simulated", "processes"];

/// Traps in simulation, by the names of the record.
const TRAPS: [(&str, &str); 5] = [
    ("ServesNothing", "serves nothing"),
    ("StallsLongerThanABlock", "stalls a request for 2.5 s, each 5 s"),
    ("SlowInFewBlocks", "5 times as slow in 5 % of its blocks, 0.8 times in the others"),
    ("SingleThreadedStalls", "service of one thread; stalls for 0.3 s, each 10 s"),
    ("StallsAtItsStart", "holds what it takes over for 0.5 s"),
];

/// Where the committed record is.
pub fn path() -> PathBuf {
    repository().join("docs/results/ab.json")
}

fn read(path: &Path) -> Result<Map<String, Value>> {
    match fs::read_to_string(path) {
        Ok(text) => serde_json::from_str(&text).with_context(|| path.display().to_string()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Map::new()),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Fails if a record could not be written there: looked at before hours of work.
pub fn check_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    ensure!(
        folder.is_dir(),
        "{}: there is no such folder: name a file with --out",
        folder.display()
    );
    Ok(())
}

/// Writes one part into a record and keeps the others.
pub fn keep(path: &Path, part: &str, figures: Value) -> Result<()> {
    let mut record = read(path)?;
    record.insert(part.into(), figures);
    let text = serde_json::to_string_pretty(&record)? + "\n";
    fs::write(path, text).with_context(|| path.display().to_string())?;
    eprintln!(
        "wrote {part:?} into {}: `cargo xtask references` brings it into docs/ab.md",
        path.display()
    );
    Ok(())
}

/// `docs/ab.md` with the passages that the committed record makes. A passage without its part stays as it is.
pub fn document() -> Result<String> {
    let file = repository().join("docs/ab.md");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    passages(&text, &read(&path())?)
}

fn passages(text: &str, record: &Map<String, Value>) -> Result<String> {
    let mut text = text.to_owned();
    for part in PARTS {
        let Some(figures) = record.get(part) else { continue };
        let [begin, end] = [
            format!("<!-- {part}: from results/ab.json -->\n"),
            format!("<!-- end of {part} -->\n"),
        ];
        let place = || format!("docs/ab.md: expected {begin:?} and {end:?}");
        let from = text.find(&begin).with_context(place)? + begin.len();
        let to = from + text[from..].find(&end).with_context(place)?;
        let made = if part == "simulated" { simulated(figures) } else { processes(figures) };
        text.replace_range(
            from..to,
            &made.with_context(|| format!("docs/results/ab.json: {part}"))?,
        );
    }
    Ok(text)
}

fn rows<'a>(figures: &'a Value, name: &str) -> Result<&'a Vec<Value>> {
    figures[name].as_array().filter(|rows| !rows.is_empty()).with_context(|| format!("no {name:?}"))
}

fn figure(row: &Value, name: &str) -> Result<f64> {
    row[name].as_f64().with_context(|| format!("no {name:?} in {row}"))
}

/// Least and most of a share, in percent.
fn range<'a>(rows: impl Iterator<Item = &'a Value>, name: &str) -> Result<String> {
    let all = rows.map(|row| figure(row, name)).collect::<Result<Vec<_>>>()?;
    let [low, high] =
        [f64::min, f64::max].map(|f| all.iter().copied().reduce(f).unwrap_or(f64::NAN));
    Ok(match (format!("{:.1}", 100.0 * low), format!("{:.1}", 100.0 * high)) {
        (low, high) if low == high => format!("{low} %"),
        (low, high) => format!("{low} to {high} %"),
    })
}

/// A paragraph in lines of the documents' width.
fn paragraph(text: &str) -> String {
    const COLUMNS: usize = 120;
    let (mut lines, mut line) = (String::new(), String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            lines += &format!("{line}\n");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    format!("{lines}{line}\n")
}

fn simulated(figures: &Value) -> Result<String> {
    let mut out = String::new();
    services(rows(figures, "services")?, &mut out)?;
    besides(rows(figures, "besides")?, &mut out)?;
    guards(rows(figures, "guards")?, &mut out)?;
    traps(rows(figures, "traps")?, &mut out)?;
    power(rows(figures, "power")?, &mut out)?;
    let combined = rows(figures, "combined")?;
    let all = || combined.iter();
    writeln!(
        out,
        "On eight GPUs ({} tests each of {} services) {} decided without a difference, and {} of intervals\nheld.",
        figure(&combined[0], "tests")?,
        combined.len(),
        range(all(), "decided")?,
        range(all(), "coverage")?,
    )?;
    let wrapped = |block: &str| match block.starts_with('|') {
        true => format!("{}\n", block.trim_end()),
        false => paragraph(block),
    };
    let blocks = out.split("\n\n").map(str::trim).filter(|block| !block.is_empty()).map(wrapped);
    Ok(format!("\n{}\n", blocks.collect::<Vec<_>>().join("\n")))
}

fn services(all: &[Value], out: &mut String) -> Result<()> {
    let (frozen, carried): (Vec<_>, Vec<_>) = all.iter().partition(|row| row["state"] == "frozen");
    let tests = figure(&all[0], "experiments")?;
    writeln!(
        out,
        "Of {tests} tests for each of ten services, so many rejected \"no difference\" without one, or had an interval that held\n\
         the truth (over all requests: of the first 300, and of all where those held it in less than 94 %):\n\n\
         | metric | rejected | interval of blocks | interval over all requests |\n| --- | --- | --- | --- |"
    )?;
    for metric in tally_ab::Metric::ALL {
        let of = || frozen.iter().copied().filter(|row| row["metric"] == metric.as_str());
        // A metric that is newer than the record.
        if of().count() == 0 && metric.unit() == Some(tally_ab::Unit::Token) {
            continue;
        }
        ensure!(of().count() == 10, "expected ten services for {metric}, found {}", of().count());
        // The interval of attainment is the one over all requests.
        let blocks = match metric.is_attainment() {
            true => String::new(),
            false => range(of(), "coverage")?,
        };
        let [rejected, overall] = [range(of(), "rejected")?, range(of(), "overall_coverage")?];
        writeln!(out, "| `{metric}` | {rejected} | {blocks} | {overall} |")?;
    }
    ensure!(!carried.is_empty(), "no service with `--state carry`");
    let carried = range(carried.into_iter(), "rejected")?;
    writeln!(out, "\nWith `--state carry`, services that learn were rejected in {carried}.\n")?;
    Ok(())
}

fn besides(all: &[Value], out: &mut String) -> Result<()> {
    writeln!(
        out,
        "Beside the metric, a figure was said to differ in {} of {} tests for each service without a\n\
         difference; intervals of `be_waited` and `preemptions` held in {}.\n",
        range(all.iter(), "rejected")?,
        figure(&all[0], "tests")?,
        range(all.iter(), "coverage")?,
    )?;
    Ok(())
}

fn guards(all: &[Value], out: &mut String) -> Result<()> {
    let is_relative =
        |row: &Value| row["guard"].as_str().is_some_and(|guard| guard.ends_with("*A"));
    let is_fair =
        |row: &&Value| row["guard"].as_str().is_some_and(|guard| guard.starts_with("be_fairness"));
    let (fair, all): (Vec<_>, Vec<_>) = all.iter().partition(is_fair);
    let (relative, absolute): (Vec<_>, Vec<_>) = all.into_iter().partition(|row| is_relative(row));
    let (mut breached, mut tests, mut names) = (0.0, 0.0, Vec::new());
    for row in &relative {
        let name = format!("`{}`", row["guard"].as_str().unwrap_or_default());
        if !names.contains(&name) {
            names.push(name);
        }
        tests += figure(row, "tests")?;
        breached += (figure(row, "breached")? * figure(row, "tests")?).round();
    }
    ensure!(!absolute.is_empty() && tests > 0.0, "guards of one kind are missing");
    writeln!(
        out,
        "A B equal to A breached {} in {breached} of {tests} tests of ten minutes. It breached limits\n\
         of 1.2 times A's true p99 in {} of tests ({} for each service); in {}, nothing had been\nsaid before.\n",
        names.join(" or "),
        range(absolute.iter().copied(), "breached")?,
        figure(absolute[0], "tests")?,
        range(absolute.iter().copied(), "untold")?,
    )?;
    if !fair.is_empty() {
        let breached = range(fair.iter().copied(), "breached")?;
        writeln!(out, "`be_fairness>0.9` was breached in {breached}.\n")?;
    }
    Ok(())
}

/// `100 keep A`, `1 keep A, 99 withdrawn`.
fn verdicts(row: &Value) -> Result<String> {
    let counts = [(figure(row, "keep_a")?, "keep A"), (figure(row, "withdrawn")?, "withdrawn")];
    let told = counts.iter().filter(|(count, _)| *count > 0.0);
    Ok(told.map(|(count, what)| format!("{count} {what}")).collect::<Vec<_>>().join(", "))
}

fn traps(all: &[Value], out: &mut String) -> Result<()> {
    writeln!(
        out,
        "Verdicts of 100 tests of each trap (on `be_throughput` B does 30 % more):\n\n\
         | B | without a guard | `hp_p99<50ms` |\n| --- | --- | --- |"
    )?;
    for (name, what) in TRAPS {
        let of = |metric: &str, guarded: bool| {
            let found = all.iter().find(|row| {
                row["trap"] == name && row["metric"] == metric && row["guard"].is_null() != guarded
            });
            found.map(verdicts).transpose()
        };
        let lacks = |metric| format!("no trap {name} by {metric}");
        let p99 = of("hp_p99", false)?.with_context(|| lacks("hp_p99"))?;
        let work = of("be_throughput", false)?.with_context(|| lacks("be_throughput"))?;
        let both = match p99 == work {
            true => p99,
            false => format!("`hp_p99`: {p99}; `be_throughput`: {work}"),
        };
        writeln!(out, "| {what} | {both} | {} |", of("hp_p99", true)?.unwrap_or_default())?;
    }
    writeln!(out)?;
    if let Some(row) = all.iter().find(|row| row["trap"] == "StarvesOne") {
        let verdicts = verdicts(row)?;
        writeln!(
            out,
            "A B that starves one of two best-effort clients, with `be_fairness>0.9`: {verdicts}.\n"
        )?;
    }
    Ok(())
}

fn power(all: &[Value], out: &mut String) -> Result<()> {
    let tests = |gpus: u64| {
        let row = all.iter().find(|row| row["gpus"] == gpus);
        row.and_then(|row| row["tests"].as_u64()).with_context(|| format!("no test on {gpus} GPUs"))
    };
    writeln!(
        out,
        "Minutes until the right verdict, and the share of wrong ones, in a queue at half load, 50 requests a second ({} tests\n\
         on one GPU, {} on eight; –: not in 20 minutes, on eight 3):\n\n\
         | metric | B over A | one GPU: half, 80 % | wrong | eight GPUs: half, 80 % | wrong |\n\
         | --- | --- | --- | --- | --- | --- |",
        tests(1)?,
        tests(8)?,
    )?;
    for one in all.iter().filter(|row| row["gpus"] == 1) {
        let same = |row: &&Value| {
            row["gpus"] == 8 && ["metric", "ratio"].iter().all(|key| row[key] == one[key])
        };
        let eight =
            all.iter().find(same).with_context(|| format!("nothing on 8 GPUs like {one}"))?;
        let cells = |row: &Value| -> Result<String> {
            let minutes =
                |name: &str| row[name].as_f64().map_or("–".into(), |min| format!("{:.2}", min));
            let wrong = 100.0 * figure(row, "wrong")?;
            Ok(format!(
                "{}, {} | {wrong:.0} %",
                minutes("median_min"),
                minutes("of_80_percent_min")
            ))
        };
        let metric = one["metric"].as_str().unwrap_or_default();
        let ratio = figure(one, "ratio")?;
        writeln!(out, "| `{metric}` | {ratio:.2} | {} | {} |", cells(one)?, cells(eight)?)?;
    }
    writeln!(out)?;
    Ok(())
}

fn processes(figures: &Value) -> Result<String> {
    let mut out = "\n| B | guard | verdicts |\n| --- | --- | --- |\n".to_owned();
    for row in rows(figures, "traps")? {
        let guard = row["guard"].as_str().map_or_else(String::new, |guard| format!("`{guard}`"));
        let others = match figure(row, "others")? {
            0.0 => String::new(),
            others => format!(", {others} **others**"),
        };
        let trap = row["trap"].as_str().unwrap_or_default();
        writeln!(out, "| {trap} | {guard} | {}{others} |", verdicts(row)?)?;
    }
    Ok(out + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample() -> Value {
        let mut services = Vec::new();
        for metric in ["hp_p99", "be_throughput", "slo_attainment", "tpot_attainment"] {
            for service in 0..10 {
                services.push(json!({"metric": metric, "state": "frozen", "experiments": 1000, "rejected": 0.02 + 0.001 * f64::from(service),
                    "coverage": 0.96, "overall_coverage": 0.98}));
            }
        }
        services.push(
            json!({"metric": "hp_p99", "state": "carry", "experiments": 1000, "rejected": 0.4}),
        );
        let traps: Vec<Value> = ["hp_p99", "be_throughput"]
            .into_iter()
            .flat_map(|metric| TRAPS.map(|(name, _)| json!({"trap": name, "metric": metric, "guard": null, "keep_a": 100, "withdrawn": 0})))
            .chain([json!({"trap": "ServesNothing", "metric": "hp_p99", "guard": "hp_p99<50ms", "keep_a": 1, "withdrawn": 99}),
                json!({"trap": "StarvesOne", "metric": "be_throughput", "guard": "be_fairness>0.9", "keep_a": 0, "withdrawn": 100})])
            .collect();
        let time = |gpus: u64, of_80: Option<f64>| {
            json!({"gpus": gpus, "metric": "hp_p99", "ratio": 1.1, "tests": 100 * gpus,
            "median_min": 2.7, "of_80_percent_min": of_80, "wrong": 0.07})
        };
        let guard = |text: &str, breached: f64| json!({"guard": text, "tests": 100, "breached": breached, "untold": 0.03});
        json!({"services": services, "traps": traps, "power": [time(1, None), time(8, Some(0.75))],
            "guards": [guard("hp_p99<1.2*A", 0.01), guard("hp_p50<1.2*A", 0.02),
                guard("be_fairness>0.9", 0.01), guard("hp_p99<1.2 times its true value", 0.5)],
            "besides": [{"tests": 200, "rejected": 0.01, "coverage": 1.0}],
            "combined": [{"tests": 300, "decided": 0.027, "coverage": 0.963}]})
    }

    #[test]
    fn each_part_fills_its_passage_and_leaves_the_rest() {
        let document = "# A\n<!-- simulated: from results/ab.json -->\nold\n<!-- end of simulated -->\nkept\n\
            <!-- processes: from results/ab.json -->\nstays\n<!-- end of processes -->\n";
        let mut record = Map::new();
        assert_eq!(passages(document, &record).unwrap(), document);
        record.insert("simulated".into(), sample());
        let text = passages(document, &record).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 120 || line.starts_with('|')));
        let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for expected in [
            "| `hp_p99` | 2.0 to 2.9 % | 96.0 % | 98.0 % |",
            "| `slo_attainment` | 2.0 to 2.9 % | | 98.0 % |",
            "| `tpot_attainment` | 2.0 to 2.9 % | | 98.0 % |",
            "A B equal to A breached `hp_p99<1.2*A` or `hp_p50<1.2*A` in 3 of",
            "`be_fairness>0.9` was breached in 1.0 %",
            "starves one of two best-effort clients, with `be_fairness>0.9`: 100 withdrawn",
            "rejected in 40.0 %",
            "in 3 of 200 tests of ten minutes",
            "1.2 times A's true p99 in 50.0 % of tests (100 for each service); in 3.0 %",
            "| serves nothing | 100 keep A | 1 keep A, 99 withdrawn |",
            "| `hp_p99` | 1.10 | 2.70, – | 7 % | 2.70, 0.75 | 7 % |",
            "2.7 % decided without a difference, and 96.3 %",
        ] {
            assert!(one_line.contains(expected), "{expected}\n{text}");
        }
        assert!(text.contains("\nkept\n") && text.contains("\nstays\n"), "{text}");
        assert!(!text.contains("\nold\n"), "{text}");
        record.insert("processes".into(), json!({"traps": [{"trap": "serves nothing", "guard": null, "keep_a": 98, "withdrawn": 1, "others": 1}]}));
        assert!(
            passages(document, &record)
                .unwrap()
                .contains("| serves nothing |  | 98 keep A, 1 withdrawn, 1 **others** |")
        );
        passages("no passage", &record).unwrap_err();
        record["simulated"]["services"][3]["metric"] = "other".into();
        let why = format!("{:#}", passages(document, &record).unwrap_err());
        assert!(why.contains("ten services for hp_p99, found 9"), "{why}");
    }

    #[test]
    fn a_part_is_kept_beside_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ab.json");
        check_folder(&path).unwrap();
        check_folder(&folder.path().join("none/ab.json")).unwrap_err();
        keep(&path, "processes", json!(1)).unwrap();
        keep(&path, "simulated", json!(2)).unwrap();
        keep(&path, "processes", json!(3)).unwrap();
        assert_eq!(Value::from(read(&path).unwrap()), json!({"processes": 3, "simulated": 2}));
        fs::write(&path, "[").unwrap();
        keep(&path, "processes", json!(3)).unwrap_err();
    }

    #[test]
    fn the_document_says_what_the_record_says() {
        let committed = fs::read_to_string(repository().join("docs/ab.md")).unwrap();
        assert!(document().unwrap() == committed, "docs/ab.md: run `cargo xtask references`");
    }
}
