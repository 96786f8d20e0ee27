/* {{name}}: best-effort launches wait while high-priority work is there, and for an idle gap
 * after it. */
#include "tally_sdk.h"

static uint64_t idle_gap_ns;

/* Called once, with the text of the configuration file; empty if there is none. */
const char *policy_init(tally_string_t text) {
  tally_config config;
  uint64_t idle_gap_us = 100;
  tally_config_read(&config, text);
  tally_config_integer(&config, "idle_gap_us", &idle_gap_us, 0, 1000000);
  idle_gap_ns = idle_gap_us * 1000;
  return tally_config_finish(&config); /* what nobody asked for is refused */
}

/* Called for each launch of a best-effort client that no lease covers. */
tally_answer policy_decide(const tally_launch *launch) {
  if (tally_is_high(launch)) return tally_run(0);
  /* Offered again when that changes. */
  if (tally_high_active(launch)) return tally_hold(TALLY_HOLD_UNTIL_CHANGE);
  if (launch->high_idle_ns < idle_gap_ns) return tally_hold(idle_gap_ns - launch->high_idle_ns);
  return tally_run(0);
}
