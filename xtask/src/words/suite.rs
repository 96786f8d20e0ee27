//! Commands of the GPU suite that documents name: each step, script and flag must be there. What there is comes from
//! the scripts' text, so that neither Python nor a GPU is needed.

use super::commands::written;
use super::{Offence, Tree};

/// The suite's folder; a bundle for another machine has it as `gpu`.
const FOLDER: &str = "bench/gpu/";
const BUNDLED: &str = "gpu/";
/// What ends the name of a variable with a step's own flags.
const ARGS: &str = "_ARGS=";

/// Every command of the suite in the documents.
pub fn commands(tree: &Tree) -> Vec<Offence> {
    let mut offences = Vec::new();
    for file in tree.documents() {
        for (line, command) in written(&file.text) {
            if let Err(what) = look_up(tree, &command) {
                offences.push(Offence { path: file.path.clone(), line, what });
            }
        }
    }
    offences
}

/// The text of one of the suite's files.
fn script<'a>(tree: &'a Tree, name: &str) -> Option<&'a str> {
    tree.file(&format!("{FOLDER}{name}")).map(|file| file.text.as_str())
}

/// Whether the suite has a step of this name.
fn is_step(tree: &Tree, name: &str) -> bool {
    let rows = script(tree, "steps.py").unwrap_or_default().split("Step(").skip(1);
    rows.into_iter().any(|row| row.trim_start().starts_with(&format!("\"{name}\",")))
}

/// Whether a script takes a flag: it names it in quotes, or as a case of its own.
fn takes(tree: &Tree, name: &str, flag: &str) -> bool {
    let has = |name: &str| {
        let is_case = |line: &str| {
            let names = line.trim_start().split_once(')').map_or("", |(names, _)| names);
            names.split('|').any(|name| name.trim() == flag)
        };
        script(tree, name)
            .is_some_and(|text| text.contains(&format!("\"{flag}\"")) || text.lines().any(is_case))
    };
    // Steps share some.
    flag == "--help" || has(name) || (name.starts_with("step_") && has("common.py"))
}

/// Whether the words are flags of a script, or their values.
fn flags<'a>(tree: &Tree, name: &str, words: impl Iterator<Item = &'a str>) -> Result<(), String> {
    for word in words.map(bare).filter(|word| word.starts_with('-') && word.len() > 1) {
        let flag = word.split('=').next().unwrap_or(word);
        if !takes(tree, name, flag) {
            return Err(format!("{FOLDER}{name} has no {flag}"));
        }
    }
    Ok(())
}

/// Without what documents put around a word.
fn bare(word: &str) -> &str {
    word.trim_matches(['[', ']', '(', ')', ',', '.', ';', '"', '\'', '…'])
}

/// Neither a placeholder nor a path.
fn is_name(word: &str) -> bool {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_');
    !word.is_empty() && word.chars().all(is_part)
}

/// Whether a command's script, steps and flags are there. Others than the suite's pass.
fn look_up(tree: &Tree, command: &str) -> Result<(), String> {
    let mut rest = command;
    // Variables come first, each perhaps with several words in quotes.
    while let Some((variable, behind)) = rest.split_once(ARGS) {
        let is_variable = |c: char| c.is_ascii_uppercase() || c == '_';
        if variable.is_empty() || !variable.chars().all(is_variable) {
            break;
        }
        let step = variable.to_ascii_lowercase();
        if !is_step(tree, &step) {
            return Err(format!("{variable}{ARGS}: the suite has no step {step}"));
        }
        let (value, next) = match behind.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => behind.split_once(' ').unwrap_or((behind, "")),
        };
        flags(tree, &format!("step_{step}.py"), value.split_whitespace())?;
        rest = next.trim_start();
    }
    let mut words =
        rest.split_whitespace().take_while(|word| !word.starts_with(['#', '|', '&', ';', '>']));
    let Some(mut program) = words.next() else { return Ok(()) };
    if program == "python3" {
        program = words.next().unwrap_or_default();
    }
    let name = program.strip_prefix(FOLDER).or_else(|| program.strip_prefix(BUNDLED));
    let Some(name) = name.filter(|name| name.ends_with(".py") || name.ends_with(".sh")) else {
        return Ok(());
    };
    if script(tree, name).is_none() && !name.contains('*') {
        return Err(format!("{FOLDER}{name} is not there"));
    }
    if name != "run.sh" {
        return flags(tree, name, words);
    }
    let mut words = words.map(bare);
    while let Some(word) = words.next() {
        if word.starts_with('-') && word.len() > 1 {
            flags(tree, name, std::iter::once(word))?;
            // Each of its flags but `--help` has a value.
            words.next();
        } else if is_name(word) && !is_step(tree, word) {
            return Err(format!("{FOLDER}{name} has no step {word}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Tree;
    use super::super::tests::tree;
    use super::*;

    /// The scripts as they are, and a document.
    fn offences(text: &str) -> Vec<String> {
        let scripts = Tree::of(&crate::repository()).unwrap();
        let names = ["run.sh", "steps.py", "render.py", "common.py", "step_pairs.py"];
        let names = names.map(|name| format!("{FOLDER}{name}"));
        let mut files: Vec<(&str, &str)> = names
            .iter()
            .map(|path| (path.as_str(), scripts.file(path).unwrap().text.as_str()))
            .collect();
        files.push(("docs/a.md", text));
        commands(&tree(&files)).into_iter().map(|offence| offence.what).collect()
    }

    #[test]
    fn commands_of_the_suite_that_are_there_pass() {
        let text = "`bench/gpu/run.sh --bundle DIR --out DIR STEP`, `bench/gpu/run.sh traces` and `DIR/run.sh -j`\n\n\
                    ```sh\n$ gpu/run.sh --bundle . --out results count pairs   # some nonsense --nothing\n\
                    PAIRS_ARGS=\"--modes mps --pairs bert+gpt2\" gpu/run.sh --bundle . \\\n  --out results pairs\n\
                    bench/gpu/render.py --import RESULTS\npython3 gpu/step_pairs.py --help\n\
                    bench/gpu/step_pairs.py --bundle . --seconds 4\nbench/gpu/steps.py --write\n```\n";
        assert_eq!(offences(text), [""; 0]);
    }

    #[test]
    fn planted_steps_scripts_and_flags_of_the_suite_are_found() {
        let of = |command: &str| {
            let found = offences(&format!("`{command}`"));
            assert_eq!(offences(&format!("```sh\n{command}\n```\n")), found);
            found
        };
        assert_eq!(
            of("bench/gpu/run.sh --bundle DIR --out DIR pears"),
            ["bench/gpu/run.sh has no step pears"]
        );
        assert_eq!(of("gpu/run.sh --bundel . pairs"), ["bench/gpu/run.sh has no --bundel"]);
        assert_eq!(of("bench/gpu/render.py --verify"), ["bench/gpu/render.py has no --verify"]);
        assert_eq!(
            of("PAIRS_ARGS=\"--pears x\" gpu/run.sh --out x pairs"),
            ["bench/gpu/step_pairs.py has no --pears"]
        );
        assert_eq!(of("PEARS_ARGS=--x gpu/run.sh"), ["PEARS_ARGS=: the suite has no step pears"]);
        assert_eq!(of("python3 gpu/step_pears.py"), ["bench/gpu/step_pears.py is not there"]);
        assert_eq!(of("gpu/step_pairs.py --pears"), ["bench/gpu/step_pairs.py has no --pears"]);
    }
}
