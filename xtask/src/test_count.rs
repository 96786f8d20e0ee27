//! Reads how many tests passed and failed out of what test runners print.

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub passed: u64,
    /// Tests that failed, or timed out.
    pub failed: u64,
    /// A runner gave figures at all.
    pub reported: bool,
    /// cargo-nextest gave its sum, which covers what single tests printed.
    summed: bool,
    /// Python tells how many ran before it tells how many of them failed.
    python_ran: u64,
}

impl Count {
    /// Takes in one line of a runner's output.
    pub fn take(&mut self, line: &str) {
        let line = line.trim();
        if self.summed {
            return;
        }
        if let Some(rest) = line.strip_prefix("test result:") {
            // Cargo: "test result: ok. 3 passed; 0 failed; 0 ignored; ..."
            self.passed += number_before(rest, "passed");
            self.failed += number_before(rest, "failed");
            self.reported = true;
        } else if line.starts_with("Summary [") && line.contains(" run: ") {
            // cargo-nextest: "Summary [ 1.2s] 9 tests run: 7 passed (1 slow), 1 failed, ..."
            let figures = line.split_once(" run: ").map_or("", |(_, figures)| figures);
            self.summed = true;
            self.passed = number_before(figures, "passed");
            self.failed = 0;
            for word in ["failed", "timed out", "exec failed"] {
                self.failed += number_before(figures, word);
            }
            self.reported = true;
        } else if let Some(rest) = line.strip_prefix("Ran ").filter(|l| l.contains(" test")) {
            // unittest: "Ran 5 tests in 0.1s", then "OK" or "FAILED (failures=1, errors=2)"
            self.python_ran = rest.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
            self.reported = true;
        } else if self.python_ran > 0 && (line == "OK" || line.starts_with("OK (")) {
            self.passed += std::mem::take(&mut self.python_ran);
        } else if self.python_ran > 0 && line.starts_with("FAILED (") {
            let ran = std::mem::take(&mut self.python_ran);
            let failed = number_after(line, "failures=") + number_after(line, "errors=");
            self.failed += failed;
            self.passed += ran.saturating_sub(failed);
        }
    }
}

impl std::ops::Add for Count {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Count {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            reported: self.reported || other.reported,
            summed: false,
            python_ran: 0,
        }
    }
}

impl std::ops::AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// The number in front of a word: "3 passed" or "3 tests passed".
fn number_before(text: &str, word: &str) -> u64 {
    let part = text.split([';', ',', '.']).map(str::trim).find(|part| {
        part.split_once(' ')
            .is_some_and(|(_, rest)| rest == word || rest.starts_with(&format!("{word} (")))
    });
    part.and_then(|part| part.split(' ').next()?.parse().ok()).unwrap_or(0)
}

/// The number right after a text.
fn number_after(text: &str, before: &str) -> u64 {
    let Some((_, rest)) = text.split_once(before) else { return 0 };
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(text: &str) -> (u64, u64) {
        let mut count = Count::default();
        text.lines().for_each(|line| count.take(line));
        (count.passed, count.failed)
    }

    #[test]
    fn cargo() {
        let text = "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out\n\
                    test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured";
        assert_eq!(counted(text), (7, 3));
    }

    #[test]
    fn nextest() {
        let text = "     Summary [   0.012s] 4 tests run: 4 passed, 0 skipped";
        assert_eq!(counted(text), (4, 0));
        let text = "     Summary [   9.9s] 9 tests run: 5 passed (2 slow), 3 failed, 1 timed out, 2 skipped";
        assert_eq!(counted(text), (5, 4));
        let text = "     Summary [   9.9s] 5/9 tests run: 5 passed (1 slow, 1 flaky), 0 skipped";
        assert_eq!(counted(text), (5, 0));
        // A failed test's own output is quoted, perhaps twice.
        let quoted = "test result: FAILED. 0 passed; 1 failed; 0 ignored";
        let sum = "     Summary [   9.9s] 2 tests run: 1 passed, 1 failed, 0 skipped";
        assert_eq!(counted(&format!("{quoted}\n{sum}\n{quoted}")), (1, 1));
    }

    #[test]
    fn unittest() {
        assert_eq!(counted("Ran 5 tests in 0.1s\n\nOK (skipped=1)"), (5, 0));
        assert_eq!(counted("Ran 5 tests in 0.1s\n\nFAILED (failures=1, errors=2)"), (2, 3));
    }

    #[test]
    fn other_lines_say_nothing() {
        assert_eq!(counted("3 passed the post; it failed\nrunning 5 tests\nOK"), (0, 0));
    }
}
