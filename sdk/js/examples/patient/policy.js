// Best-effort launches wait while high-priority work is there, and after it for as long as
// the longest pause between two pieces of it was so far, at most `most_us`: it learns how
// long to be patient, and a reload does not make it forget. The same in four languages:
// `sdk/*/examples/patient`, and each takes what another saved.

import { gauge, gaugeSet, subscribe } from 'tally:policy/host@0.1.2';
import { Config, expect, telling, u64 } from './tally_sdk.js';

const HOLD_NS_MAX = 1_000_000_000;
const RUN = { tag: 'run', val: 0 };

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
    subscribe({ highActivity: true, completions: false });
  },

  decide(launch) {
    if (launch.class === 'high') return RUN;
    if (launch.flags.highBusy) return { tag: 'hold', val: HOLD_NS_MAX };
    const quiet = u64(launch.highQuietNs);
    if (quiet < pauseNs) return { tag: 'hold', val: pauseNs - quiet };
    return RUN;
  },

  onEvent(nowNs, event) {
    if (event.tag === 'high-idle') {
      idleSinceNs = nowNs;
    } else if (event.tag === 'high-busy' && idleSinceNs !== null) {
      learn(nowNs - idleSinceNs);
      idleSinceNs = null;
    }
  },
});

// The Makefile builds a policy that keeps what it learnt because of this export.
export const state = telling({
  snapshot() {
    const data = new DataView(new ArrayBuffer(8)); // little-endian
    data.setUint32(0, pauseNs, true); // at most 10^8
    return { format: 'patient', version: 1, data: new Uint8Array(data.buffer) };
  },

  restore(from) {
    expect(from, 'patient', 1);
    const bytes = Uint8Array.from(from.data);
    if (bytes.length !== 8) throw 'expected 8 bytes';
    const data = new DataView(bytes.buffer);
    learn(data.getUint32(4, true) * 2 ** 32 + data.getUint32(0, true));
  },
});
