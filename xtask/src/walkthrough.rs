//! Follows a tutorial to the letter: the section `Tutorial` of `docs/policies.md`.
//!
//! Fenced blocks marked `sh` are run, one after the other in one shell; those marked with a language and a file
//! (`rust src/lib.rs`) are written to that file; all others are for reading. Then the files that the tutorial
//! promises are checked.

use crate::languages::{Environment, in_environment};
use crate::{build, repository};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

const TUTORIAL: &str = "docs/policies.md";
const TITLE: &str = "## Tutorial";
/// Where the tutorial says its project is, and what it says of the simulations in it.
const PROJECT: &str = "night-shift";

/// Follow it in a folder of its own.
pub fn follow(out: &Path, environment: &Environment) -> Result<()> {
    let text = fs::read_to_string(repository().join(TUTORIAL)).context(TUTORIAL)?;
    let script = script(section(&text, TITLE)?)?;
    let folder = out.join("tutorial");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("followed.sh"), &script)?;
    let mut path = vec![build::release_dir()];
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    let mut bash = Command::new("bash");
    bash.current_dir(&folder).arg("followed.sh").stdin(Stdio::null()).stdout(std::io::stderr());
    in_environment(&mut bash, environment)
        .env("TALLY", build::release_dir())
        .env("TALLY_CLONE", repository())
        .env("XDG_STATE_HOME", folder.join("state"))
        .env("PATH", std::env::join_paths(path)?);
    let done = bash.status().context("starting bash")?;
    ensure!(done.success(), "{done} (why: above; {}/followed.sh)", folder.display());
    promised(&folder.join(PROJECT))
}

/// The tutorial's first policy is no better than `fifo`, its last one is by far.
fn promised(project: &Path) -> Result<()> {
    let p99 = |name: &str| -> Result<f64> {
        let text = fs::read_to_string(project.join(name)).with_context(|| name.to_owned())?;
        let report: Value = serde_json::from_str(&text)?;
        let p99 = report["high_priority"]["service_p99_ms"].as_f64();
        p99.with_context(|| format!("{name} tells no p99"))
    };
    let (fifo, first, waits, last) =
        (p99("fifo.json")?, p99("first.json")?, p99("waits.json")?, p99("preemptible.json")?);
    eprintln!("simulated p99 of high priority, ms: fifo {fifo}, {first}, {waits}, {last}");
    ensure!(first == fifo, "the first version is another than fifo: {first} ms, {fifo} ms");
    ensure!(waits < fifo * 0.5, "waiting does not halve what fifo takes: {waits} ms, {fifo} ms");
    ensure!(last < waits, "preemption is no better than waiting: {last} ms, {waits} ms");
    Ok(())
}

/// The text from one second-level heading to the next.
fn section<'a>(document: &'a str, title: &str) -> Result<&'a str> {
    let (_, rest) =
        document.split_once(&format!("\n{title}\n")).with_context(|| format!("no {title:?}"))?;
    Ok(rest.split_once("\n## ").map_or(rest, |(section, _)| section))
}

/// A shell script that does what the document says.
fn script(document: &str) -> Result<String> {
    let mut script = String::from("set -euxo pipefail\n");
    let mut lines = document.lines().enumerate();
    let mut blocks = 0;
    while let Some((number, line)) = lines.next() {
        let Some(info) = line.strip_prefix("```") else { continue };
        let mut content = String::new();
        let mut ended = false;
        for (_, line) in lines.by_ref() {
            if line == "```" {
                ended = true;
                break;
            }
            content.push_str(line);
            content.push('\n');
        }
        ensure!(ended, "the block that begins in line {} does not end", number + 1);
        let mut words = info.split_whitespace();
        match (words.next(), words.next()) {
            (Some("sh"), None) => script.push_str(&content),
            (Some(_), Some(file)) => {
                const END: &str = "END-OF-WHAT-IS-WRITTEN";
                script.push_str(&format!("cat > '{file}' <<'{END}'\n{content}{END}\n"));
            }
            _ => continue,
        }
        blocks += 1;
    }
    ensure!(blocks > 0, "nothing to follow");
    Ok(script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_run_files_written_and_the_rest_is_read() {
        let document =
            "a\n```sh\nls\ncd x\n```\n```rust src/lib.rs\nfn x() {}\n```\n```text\nno\n```\n";
        let script = script(document).unwrap();
        let expected = "set -euxo pipefail\nls\ncd x\ncat > 'src/lib.rs' \
                        <<'END-OF-WHAT-IS-WRITTEN'\nfn x() {}\nEND-OF-WHAT-IS-WRITTEN\n";
        assert_eq!(script, expected);
    }

    #[test]
    fn only_the_section_is_followed() {
        let document = "# A\n\n## B\nx\n\n### C\ny\n\n## D\nz\n";
        assert_eq!(section(document, "## B").unwrap(), "x\n\n### C\ny\n");
        assert!(section(document, "## E").is_err());
    }

    #[test]
    fn a_block_without_an_end_is_an_error() {
        assert!(super::script("```sh\nls\n").is_err());
        assert!(super::script("no blocks").is_err());
    }
}
