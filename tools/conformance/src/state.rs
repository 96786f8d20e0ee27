//! The optional interface `state`: what was learned must come out, and go in again.

use crate::Options;
use crate::checks::{first_line, not_run, pass, runner};
use crate::harness::Harness;
use crate::report::{Check, Outcome};
use crate::steady::Stopped;
use crate::stream::{self, Step};
use crate::subject::Subject;
use proptest::strategy::{Strategy, ValueTree};
use tally_wasm_host::{Restored, Saved};

/// Streams whose outcome is saved.
const STREAMS: u32 = 6;
const NAME: &str = "state";

fn fail(detail: String, advice: &'static str) -> Check {
    Check { name: NAME, outcome: Outcome::Fail, detail, advice }
}

/// What one fresh instance saves after a stream.
fn saved_after(subject: &dyn Subject, steps: &[Step]) -> Result<Option<Saved>, Stopped> {
    let mut harness = Harness::new(subject.start(None)?);
    harness.record(steps);
    // An instance that trapped in its last call has nothing to tell.
    Ok(harness.snapshot().transpose()?)
}

/// Snapshots of like histories are alike, an own one is taken back, instances that
/// started from it answer alike, and a damaged or foreign one does no harm.
pub fn state(subject: &dyn Subject, options: &Options) -> Check {
    looked_at(subject, options).unwrap_or_else(|stopped| match stopped {
        Stopped::Fault(fault) => fail(
            format!("{:?} in `snapshot`: {}", fault.kind, first_line(&fault.message)),
            "a snapshot has the fuel of `snapshot_fuel` and at most 256 KiB: write down what \
             matters, and of that only so much",
        ),
        other => not_run(NAME, other),
    })
}

fn looked_at(subject: &dyn Subject, options: &Options) -> Result<Check, Stopped> {
    let mut runner = runner(options.seed ^ 0x57a7e, STREAMS);
    let (mut snapshots, mut bytes_max) = (0, 0);
    for n in 0..STREAMS {
        let Ok(tree) = stream::stream().new_tree(&mut runner) else { continue };
        let steps = tree.current();
        let (before, after) = steps.split_at(steps.len() / 2);
        let Some(saved) = saved_after(subject, before)? else { continue };
        if saved_after(subject, before)?.as_ref() != Some(&saved) {
            return Ok(fail(
                format!("stream {n}: two instances with the same history save differently"),
                "let no order of a hash map decide how state is written",
            ));
        }
        snapshots += 1;
        bytes_max = bytes_max.max(saved.data.len());
        let first = subject.start(Some(&saved))?;
        if first.restored() != Restored::Accepted {
            return Ok(fail(
                format!("stream {n}: its own snapshot: {:?}", first.restored()),
                "`restore` must take what `snapshot` of the same version and configuration made",
            ));
        }
        let one = Harness::new(first).record(after);
        let other = Harness::new(subject.start(Some(&saved))?).record(after);
        if one != other {
            return Ok(fail(
                format!("stream {n}: two instances that started from one snapshot differ"),
                "decide by what was restored and what is passed in only",
            ));
        }
        if let Some(check) = damaged(subject, &saved)? {
            return Ok(check);
        }
    }
    let detail = format!("{snapshots} snapshots of at most {bytes_max} bytes, taken back");
    Ok(if snapshots > 0 {
        pass(NAME, detail)
    } else {
        let advice = "mend the faults first";
        Check { name: NAME, outcome: Outcome::NotRun, detail: "no snapshot came".into(), advice }
    })
}

/// Refusing is as good as taking; trapping is not, and neither is taking what another
/// policy wrote.
fn damaged(subject: &dyn Subject, saved: &Saved) -> Result<Option<Check>, Stopped> {
    let half = Saved { data: saved.data[..saved.data.len() / 2].to_vec(), ..saved.clone() };
    let mut noise = saved.clone();
    noise.data.iter_mut().enumerate().for_each(|(at, byte)| *byte ^= (at * 73 + 41) as u8);
    for (what, offered) in [("half of it", half), ("noise", noise)] {
        if let Restored::Failed(why) = subject.start(Some(&offered))?.restored() {
            return Ok(Some(fail(
                format!("`restore` of {what} fails: {}", first_line(&why)),
                "what is restored may be anything: check it and answer with an error",
            )));
        }
    }
    let foreign = Saved { format: "another policy\u{2019}s".into(), ..saved.clone() };
    if subject.start(Some(&foreign))?.restored() == Restored::Accepted {
        return Ok(Some(fail(
            "`restore` takes what calls itself another policy\u{2019}s".into(),
            "look at `format` (and `version`) first, and refuse what is not your own",
        )));
    }
    Ok(None)
}
