// {{name}}: best-effort launches wait while high-priority work is there, and for an idle gap
// after it.
//
// JavaScript takes some 10 us to decide, so it decides rarely: while high priority is idle
// a client gets a lease for many launches, which is ended when high-priority work appears.

import { revokeLease } from 'tally:policy/control@0.1.0';
import { Config, HOLD_UNTIL_CHANGE, hold, run, telling, u64 } from './tally_sdk.js';

let idleGapNs = 0;
let lease = 0;
const leased = new Set(); // clients that may have some of a lease left, in order

export const scheduler = telling({
  // Called once, with the text of the configuration file; empty if there is none.
  init(text) {
    const config = new Config(text);
    idleGapNs = config.integer('idle_gap_us', 100, 0, 1_000_000) * 1_000;
    lease = config.integer('lease', 1_000, 0, 1_000_000);
    config.finish();
  },

  // Called for a launch of a best-effort client that has no lease.
  decide(launch) {
    if (launch.state.highPriority) return run();
    if (launch.state.highActive) return hold(HOLD_UNTIL_CHANGE);
    const idle = u64(launch.highIdleNs);
    if (idle < idleGapNs) return hold(idleGapNs - idle);
    if (lease > 0) leased.add(launch.client);
    return run(lease);
  },
});

// When high-priority work appears, what was given freely ends.
export const activity = telling({
  highStarted() {
    for (const client of leased) revokeLease(client);
    leased.clear();
  },
  highEnded() {},
});

export const membership = telling({
  joined() {},
  left(nowNs, client) {
    leased.delete(client);
  },
});
