// Best-effort launches wait while high-priority work is there and for `quiet_us` after it.
//
// With `lease` = N, N further launches of a client then go without a question, until
// high-priority work appears. The same in four languages: `sdk/*/examples/quiet`.

import { revokeLease, subscribe } from 'tally:policy/host@0.1.2';
import { Config, telling, u64 } from './tally_sdk.js';

const HOLD_NS_MAX = 1_000_000_000;
const RUN = { tag: 'run', val: 0 };

let quietNs = 0;
let lease = 0;
const leased = new Set(); // clients that may have some of a lease left, in order

export const scheduler = telling({
  init(text) {
    const config = new Config(text);
    quietNs = config.integer('quiet_us', 100, 0, 1_000_000) * 1_000;
    lease = config.integer('lease', 0, 0, 1_000_000);
    config.finish();
    if (lease > 0) subscribe({ highActivity: true, completions: false });
  },

  decide(launch) {
    if (launch.class === 'high') return RUN;
    if (launch.flags.highBusy) return { tag: 'hold', val: HOLD_NS_MAX };
    const quiet = u64(launch.highQuietNs);
    if (quiet < quietNs) return { tag: 'hold', val: quietNs - quiet };
    if (lease > 0) leased.add(launch.client);
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
