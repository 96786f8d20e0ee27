//! Commands and flags that documents name: each must be one that the program's `--help` has.

use super::links::{code_spans, prose};
use super::{Offence, Tree};
use crate::build;
use clap::{CommandFactory, ValueEnum};
use std::collections::BTreeMap;
use std::process::{Command, Stdio};

/// Programs whose commands are checked, as they are typed.
const PROGRAMS: [&str; 3] = ["cargo xtask", "tallyctl", "tally-core"];

/// The help of a program, or of a subcommand. `None`: the program is not built.
type Help<'a> = &'a mut dyn FnMut(&str, &[String]) -> Option<String>;

/// Every command in the documents, by the programs that are built.
pub fn commands(tree: &Tree) -> Vec<Offence> {
    let mut known: BTreeMap<Vec<String>, Option<String>> = BTreeMap::new();
    check(tree, &mut |program, path| {
        let key = std::iter::once(program.to_owned()).chain(path.iter().cloned()).collect();
        known.entry(key).or_insert_with(|| help(program, path)).clone()
    })
}

pub fn left_out() -> Vec<String> {
    let missing = PROGRAMS.iter().filter(|program| help(program, &[]).is_none());
    missing.map(|program| format!("commands of {program} in documents (it is not built)")).collect()
}

fn help(program: &str, path: &[String]) -> Option<String> {
    if program == "cargo xtask" {
        let mut command = crate::Cli::command();
        let mut at = &mut command;
        for name in path {
            at = at.find_subcommand_mut(name)?;
        }
        return Some(at.render_long_help().to_string());
    }
    let mut asked = Command::new(build::release_dir().join(program));
    asked.args(path).arg("--help").stdin(Stdio::null()).stderr(Stdio::null());
    let output = asked.output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok()
}

fn check(tree: &Tree, help: Help) -> Vec<Offence> {
    let mut offences = Vec::new();
    for file in tree.documents().filter(|file| !file.is_generated()) {
        for (line, command) in typed(&file.text) {
            if let Err(what) = look_up(&command, help) {
                offences.push(Offence { path: file.path.clone(), line, what });
            }
        }
    }
    offences
}

/// The commands of [`PROGRAMS`] in a document.
fn typed(text: &str) -> Vec<(usize, String)> {
    let is_ours = |command: &str| PROGRAMS.iter().any(|program| begins(command, program).is_some());
    written(text).into_iter().filter(|(_, command)| is_ours(command)).collect()
}

/// Lines of fenced code and code spans, with their lines; a line that is continued is one.
pub fn written(text: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let (mut is_code, mut continued) = (false, None::<(usize, String)>);
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
            continue;
        }
        if !is_code {
            continue;
        }
        let (number, before) = continued.take().unwrap_or((at + 1, String::new()));
        let whole = format!("{before}{}", line.trim());
        match whole.strip_suffix('\\') {
            Some(part) => continued = Some((number, part.to_owned())),
            None => found.push((number, whole)),
        }
    }
    for (number, line) in prose(text) {
        found.extend(code_spans(line).map(|span| (number, span.to_owned())));
    }
    let plain = found.into_iter().map(|(number, command)| {
        (number, command.trim_start_matches("$ ").trim_start().to_owned())
    });
    plain.collect()
}

/// What is behind the program's name, if the command is one of it.
fn begins<'a>(command: &'a str, program: &str) -> Option<&'a str> {
    command.strip_prefix(program).filter(|rest| rest.is_empty() || rest.starts_with(' '))
}

/// Whether the subcommands and flags of a command are there.
fn look_up(command: &str, help: Help) -> Result<(), String> {
    let named = PROGRAMS.iter().find_map(|program| Some((*program, begins(command, program)?)));
    let Some((program, rest)) = named else { return Ok(()) };
    let mut words = rest.split_whitespace().take_while(|word| {
        // The command ends at a comment, another command, or the program that it starts.
        !word.starts_with(['#', '|', '&', ';', '>', '<']) && *word != "--"
    });
    let mut path: Vec<String> = Vec::new();
    let Some(mut text) = help(program, &path) else { return Ok(()) };
    let mut may_be_subcommand = true;
    while let Some(word) = words.next() {
        let word = word.trim_matches(['[', ']', '(', ')', ',', '.', ';']);
        if word.starts_with("--") {
            let flag = word.split('=').next().unwrap_or(word);
            if !has_flag(&text, flag) {
                return Err(format!("{program} {}has no {flag}", spaced(&path)));
            }
            // Its value is no subcommand; one may follow behind it.
            let value = match word.split_once('=') {
                Some((_, value)) => Some(value),
                None if text.contains(&format!("{flag} <")) => words.next(),
                None => None,
            };
            let values = values(&text, flag);
            if let Some(value) = value.filter(|value| is_plain(value))
                && !values.is_empty()
                && !values.iter().any(|known| known == value)
            {
                return Err(format!("{program} {}has no {flag} {value}", spaced(&path)));
            }
        } else if may_be_subcommand && is_plain(word) {
            let subcommands = subcommands(&text);
            if subcommands.is_empty() {
                may_be_subcommand = false;
                if program == "cargo xtask" && path == ["test"] {
                    is_group(word)?;
                }
            } else if subcommands.iter().any(|known| known == word) {
                path.push(word.to_owned());
                match help(program, &path) {
                    Some(more) => text = more,
                    None => return Err(format!("{program} {}has no help", spaced(&path))),
                }
            } else {
                return Err(format!("{program} {}has no {word}", spaced(&path)));
            }
        } else {
            may_be_subcommand = false;
        }
    }
    Ok(())
}

fn spaced(path: &[String]) -> String {
    path.iter().flat_map(|name| [name.as_str(), " "]).collect()
}

/// Neither a placeholder (`NAME`) nor a path nor a value.
fn is_plain(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase() || c == '-')
}

fn is_group(word: &str) -> Result<(), String> {
    let groups = crate::test::Group::value_variants().iter();
    if groups.filter_map(ValueEnum::to_possible_value).any(|group| group.get_name() == word) {
        return Ok(());
    }
    Err(format!("cargo xtask test has no group {word}"))
}

fn has_flag(help: &str, flag: &str) -> bool {
    help.match_indices(flag).any(|(at, _)| {
        let behind = help[at + flag.len()..].chars().next();
        behind.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '-' && c != '_')
    })
}

/// The values that a flag can have, if its help lists them.
fn values(help: &str, flag: &str) -> Vec<String> {
    let is_flag = |line: &str| {
        let line = line.trim_start();
        line.starts_with("--") || (line.starts_with('-') && line.contains(", --"))
    };
    let about = help.lines().skip_while(|line| !(is_flag(line) && has_flag(line, flag)));
    let mut lines = about.enumerate().take_while(|(at, line)| *at == 0 || !is_flag(line));
    let Some(at_list) = lines.find_map(|(_, line)| line.split_once("ossible values:")) else {
        return Vec::new();
    };
    if let Some((inline, _)) = at_list.1.split_once(']') {
        return inline.split(',').map(|value| value.trim().to_owned()).collect();
    }
    let listed = lines.map_while(|(_, line)| line.trim().strip_prefix("- "));
    listed.filter_map(|line| Some(line.split(':').next()?.trim().to_owned())).collect()
}

/// The names under `Commands:`.
fn subcommands(help: &str) -> Vec<String> {
    let behind = help.lines().skip_while(|line| line.trim() != "Commands:").skip(1);
    // Names stand two columns in; their texts, if on lines of their own, further.
    let listed = behind.take_while(|line| line.is_empty() || line.starts_with("  "));
    let names = listed.filter_map(|line| line.strip_prefix("  ").filter(|l| !l.starts_with(' ')));
    names.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::tree;
    use super::*;

    const TOOL: &str =
        "Commands:\n  ab      Compare\n  status  Show\n\nOptions:\n  --socket <PATH>\n  --help\n";
    const AB: &str =
        "Commands:\n  start\n          Begin\n  stop   End\n\nOptions:\n  -h, --help\n";
    const START: &str = "Usage: start\n\nOptions:\n      --block <TIME>  Length\n      --to-end\n\
         \x20     --form <FORM>\n          How\n          Possible values:\n          - fast: Soon\n          - slow: Later\n\
         \x20     --unit <UNIT>  [possible values: ms, us]\n";

    fn fake(program: &str, path: &[String]) -> Option<String> {
        let names: Vec<&str> = path.iter().map(String::as_str).collect();
        match (program, names.as_slice()) {
            ("tallyctl", []) => Some(TOOL.into()),
            ("tallyctl", ["ab"]) => Some(AB.into()),
            ("tallyctl", ["ab", "start"]) => Some(START.into()),
            ("tallyctl", ["status"] | ["ab", "stop"]) => Some("Usage: stop\n".into()),
            ("cargo xtask", _) => help(program, path),
            _ => None,
        }
    }

    fn offences(text: &str) -> Vec<String> {
        let tree = tree(&[("docs/a.md", text)]);
        check(&tree, &mut fake).into_iter().map(|offence| offence.what).collect()
    }

    #[test]
    fn commands_that_are_there_pass() {
        let text = "Run `tallyctl ab start B --block 2s --form slow --unit us` or\n\n```sh\n\
                    tallyctl ab start b.wasm --block=2s \\\n  --to-end   # --nothing\n\
                    tallyctl status -- --any-flag-of-a-program\n\
                    tallyctl --socket status ab --help stop > file --nothing\n\
                    cargo xtask test unit NAME\ntallyctl ab stop\n```\n";
        assert_eq!(offences(text), [""; 0]);
    }

    #[test]
    fn what_no_program_has_is_found() {
        assert_eq!(offences("`tallyctl shadow start`"), ["tallyctl has no shadow"]);
        assert_eq!(offences("`tallyctl ab begin`"), ["tallyctl ab has no begin"]);
        assert_eq!(
            offences("`tallyctl ab start [--washout TIME]`"),
            ["tallyctl ab start has no --washout"]
        );
        assert_eq!(
            offences("```\n$ tallyctl ab start b \\\n  --blo 1\n```"),
            ["tallyctl ab start has no --blo"]
        );
        assert_eq!(
            offences("`tallyctl ab start --form mode fast`, `tallyctl ab start --unit=ns`"),
            ["tallyctl ab start has no --form mode", "tallyctl ab start has no --unit ns"]
        );
        assert_eq!(offences("`cargo xtask nonesuch`"), ["cargo xtask has no nonesuch"]);
        assert_eq!(
            offences("`cargo xtask test nonesuch`"),
            ["cargo xtask test has no group nonesuch"]
        );
    }

    #[test]
    fn other_programs_and_ones_that_are_not_built_are_not_asked() {
        assert_eq!(
            offences("`tally-core --nothing`, `tallyctls --nothing`, `cargo test`"),
            [""; 0]
        );
    }

    #[test]
    fn every_subcommand_is_listed_and_has_help() {
        let all = subcommands(&help("cargo xtask", &[]).unwrap());
        assert!(all.iter().any(|name| name == "gpu-bundle") && all.len() >= 10, "{all:?}");
        assert!(all.iter().all(|name| help("cargo xtask", std::slice::from_ref(name)).is_some()));
        assert_eq!(help("cargo xtask", &["nonesuch".into()]), None);
    }
}
