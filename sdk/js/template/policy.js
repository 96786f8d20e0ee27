// {{name}}: best-effort launches wait while high-priority work is there, and for a while
// after it.
//
// JavaScript takes some 10 us to decide, so it decides rarely: while high priority is quiet
// a client gets a lease for many launches, which is ended when high-priority work appears.

import { revokeLease, subscribe } from 'tally:policy/host@0.1.2';
import { Config, telling, u64 } from './tally_sdk.js';

const HOLD_NS_MAX = 1_000_000_000; // offered again when something changes
const RUN = { tag: 'run', val: 0 };

let quietNs = 0;
let lease = 0;
const leased = new Set(); // clients that may have some of a lease left, in order

export const scheduler = telling({
  // Called once, with the text of the configuration file; empty if there is none.
  init(text) {
    const config = new Config(text);
    quietNs = config.integer('quiet_us', 100, 0, 1_000_000) * 1_000;
    lease = config.integer('lease', 1_000, 0, 1_000_000);
    config.finish();
    subscribe({ highActivity: true, completions: false });
  },

  // Called for a launch of a best-effort client that has no lease.
  decide(launch) {
    if (launch.class === 'high') return RUN;
    if (launch.flags.highBusy) return { tag: 'hold', val: HOLD_NS_MAX };
    const quiet = u64(launch.highQuietNs);
    if (quiet < quietNs) return { tag: 'hold', val: quietNs - quiet };
    leased.add(launch.client);
    return { tag: 'run', val: lease };
  },

  onEvent(nowNs, event) {
    if (event.tag === 'high-busy') {
      for (const client of leased) revokeLease(client);
      leased.clear();
    } else if (event.tag === 'client-left') {
      leased.delete(event.val);
    }
  },
});
