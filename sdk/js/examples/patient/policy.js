// Best-effort launches wait while high-priority work is there, and after it for as long as
// the longest pause between two pieces of it was so far, at most `most_us`: it learns how
// long to be patient, and a reload does not make it forget. The same in four languages:
// `sdk/*/examples/patient`, and each takes what another saved.

import { gauge, gaugeSet } from 'tally:policy/metrics@0.1.0';
import { Config, HOLD_UNTIL_CHANGE, Reader, Writer, hold, run, telling, u64 } from './tally_sdk.js';

let mostNs = 0;
let pauseNs = 0; // the longest pause seen
let idleSinceNs = null; // since when there is one
let shown = 0; // the gauge that shows it in `tallyctl status`

function learn(pause) {
  pauseNs = Math.max(pauseNs, Math.min(pause, mostNs));
  gaugeSet(shown, pauseNs);
}

export const scheduler = telling({
  init(text) {
    const config = new Config(text);
    mostNs = config.integer('most_us', 1_000, 0, 100_000) * 1_000;
    config.finish();
    shown = gauge('pause_ns');
  },

  decide(launch) {
    if (launch.state.highPriority) return run();
    if (launch.state.highActive) return hold(HOLD_UNTIL_CHANGE);
    const idle = u64(launch.highIdleNs);
    if (idle < pauseNs) return hold(pauseNs - idle);
    return run();
  },
});

export const activity = telling({
  highEnded(nowNs) {
    idleSinceNs = nowNs;
  },
  highStarted(nowNs) {
    if (idleSinceNs !== null) learn(nowNs - idleSinceNs);
    idleSinceNs = null;
  },
});

export const state = telling({
  snapshot() {
    const out = new Writer('patient', 1);
    out.number(pauseNs);
    return out.finish();
  },

  restore(from) {
    learn(new Reader(from, 'patient', 1).number());
  },
});
