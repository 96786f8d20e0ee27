// Best-effort launches run while no unit of a service is open, or while the open ones can lose the time that the launch
// is predicted to take and `margin_us` more; else they wait, unless the GPU has had no high-priority work for 2 ms.
// With `width_percent` below 100 a best-effort client runs on at most that share of the SMs. The counter
// `units_late` counts units that took longer than their objective. The same in four languages:
// `sdk/*/examples/slack`.

import { write } from 'tally:policy/log@0.1.0';
import { counter, counterAdd } from 'tally:policy/metrics@0.1.0';
import { get as service, slackNs } from 'tally:policy/services@0.1.0';
import { all as widths, set as setWidth } from 'tally:policy/widths@0.1.0';
import { Config, HOLD_UNTIL_CHANGE, NO_UNIT_OPEN, UNKNOWN, hold, run, telling, u32, u64 } from './tally_sdk.js';

const IDLE_NS = 2_000_000; // high priority has been idle for so long: nobody waits for it
let unknownNs = 0; // what a launch counts as whose predicted time is UNKNOWN
let marginNs = 0;
let widthPercent = 100;
const newClients = new Set(); // best-effort clients that have not been given a width yet, in order
let isRefused = false; // the log says already that there is no width for them
let unitsLate = 0; // the counter

// Give new clients their width: the largest of at most `width_percent` of the SMs.
function setWidths(smCount) {
  const sms = widths().findLast((sms) => u32(sms) * 100 <= smCount * widthPercent);
  if (sms !== undefined) {
    for (const client of newClients) setWidth(client, sms);
  } else if (!isRefused) {
    isRefused = true;
    write('warn', 'width_percent: launches cannot be limited to so few SMs');
  }
  newClients.clear();
}

export const scheduler = telling({
  init(text) {
    const config = new Config(text);
    unknownNs = config.integer('unknown_us', 2_000, 0, 1_000_000) * 1_000;
    marginNs = config.integer('margin_us', 200, 0, 1_000_000) * 1_000;
    widthPercent = config.integer('width_percent', 100, 1, 100);
    config.finish();
    unitsLate = counter('units_late');
  },

  decide(launch) {
    if (launch.state.highPriority) return run();
    // Not in `joined`: only a launch says how many SMs there are.
    const smCount = u32(launch.smCount);
    if (newClients.size > 0 && smCount > 0) setWidths(smCount);
    if (launch.highClients === 0) return run();
    const slack = slackNs(launch.nowNs);
    const predicted = u64(launch.predictedNs);
    const needed = (predicted === UNKNOWN ? unknownNs : predicted) + marginNs;
    const idle = u64(launch.highIdleNs);
    if (slack === NO_UNIT_OPEN || slack >= needed || idle >= IDLE_NS) return run();
    return hold(launch.state.highActive ? HOLD_UNTIL_CHANGE : IDLE_NS - idle);
  },
});

export const membership = telling({
  joined(nowNs, client) {
    if (client.class === 'best-effort' && widthPercent < 100) newClients.add(client.id);
  },
  left(nowNs, client) {
    newClients.delete(client);
  },
});

export const units = telling({
  began() {},
  ended(nowNs, client, count, tookNs) {
    const objective = service(client)?.objective;
    if (objective && u64(tookNs) > objective.sloNs) counterAdd(unitsLate, count);
  },
});
