//! Launches on several numbers of SMs take several hardware queues.

use crate::both_under;
use crate::forms::until_limited;
use crate::governor::SMS;
use crate::program::{ask, ok};
use crate::welcome;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::ring::Answer;
use tally_ipc::wire::{RewriteSettings, SharingMode, Welcome};

const CROWD: u32 = 2_048;
/// Each wide enough for another green context.
const WIDTHS: [u32; 3] = [SMS - 1, SMS - 2, SMS - 3];

/// Three streams wait for a word that the fourth writes behind a kernel. A queue for each stream, and for one stream on
/// some of the SMs beside each, is there; not for each number of SMs.
#[test]
fn streams_that_wait_leave_a_queue_to_who_ends_the_wait() {
    let rewrite = RewriteSettings { reserve_sms: vec![1, 2, 3], ..welcome().rewrite };
    let welcome = Welcome { sharing: SharingMode::Unmanaged, rewrite, ..welcome() };
    both_under(
        streams_that_wait_leave_a_queue_to_who_ends_the_wait,
        // Five streams, one for each on some of the SMs, two of the shim's.
        &[("CUDA_DEVICE_MAX_CONNECTIONS", "12")],
        &welcome,
        |device| {
            device.primary_context();
            device.warm_up();
            let (waits, writes) = ([(); 3].map(|()| device.stream(1)), device.stream(1));
            let cells = [(); 4].map(|()| device.cells(CROWD));
            let mut ks = Vec::new();
            let step = |at: usize, stream, k| {
                device.step(&cells[at], [CROWD, 1, 1], stream, k, 0);
            };
            while ask("limited?") == "no" {
                ks.push(ks.len() as u32);
                for (at, stream) in waits.into_iter().chain([writes]).enumerate() {
                    step(at, stream, ks[ks.len() - 1]);
                    device.sync(stream);
                }
            }
            let mut ks = [ks.clone(), ks.clone(), ks.clone(), ks];
            ask("now");
            let word = device.words().as_ptr() as u64;
            for (at, stream) in waits.into_iter().enumerate() {
                // SAFETY: pinned memory and a stream of ours. 0: greater or equal.
                ok(unsafe { (device.cuda.cuStreamWaitValue32_v2)(stream, word, 1, 0) });
                for _ in WIDTHS {
                    ks[at].push(ks[at].len() as u32);
                    step(at, stream, ks[at][ks[at].len() - 1]);
                }
            }
            ks[3].push(ks[3].len() as u32);
            step(3, writes, ks[3][ks[3].len() - 1]);
            // SAFETY: as above.
            ok(unsafe { (device.cuda.cuStreamWriteValue32_v2)(writes, word, 1, 0) });
            for (at, stream) in waits.into_iter().chain([writes]).enumerate() {
                device.sync(stream);
                device.check_steps(&cells[at], &ks[at]);
            }
            device.sync(null_mut());
        },
        |core| {
            core.warm_up("step");
            until_limited(core, "limited?");
            core.expect("now");
            let before = core.counters().sm_limited.load(SeqCst);
            let mut widths = WIDTHS.into_iter().cycle();
            core.policy(move |_, _| Answer::SmLimited(widths.next().unwrap_or(SMS)));
            core.say("go");
            core.ends(0);
            let limited = core.counters().sm_limited.load(SeqCst) - before;
            // The first of each stream; what would need one more queue runs whole.
            let whole = core.counters().degraded.load(SeqCst);
            assert!(limited >= 4 && limited + whole == 10, "{limited} {whole}");
        },
    );
}
