/* {{name}}: best-effort launches wait while high-priority work is there, and for a while
 * after it. */
#include "tally_sdk.h"

static uint64_t quiet_ns;

/* Called once, with the text of the configuration file; empty if there is none. */
const char *policy_init(tally_string_t text) {
  tally_config config;
  uint64_t quiet_us = 100;
  tally_config_read(&config, text);
  tally_config_integer(&config, "quiet_us", &quiet_us, 0, 1000000);
  quiet_ns = quiet_us * 1000;
  return tally_config_finish(&config); /* what nobody asked for is refused */
}

/* Called for every launch of a best-effort client. */
tally_decision policy_decide(const tally_launch *launch) {
  if (tally_is_high(launch)) return tally_run(0);
  /* Offered again when that changes. */
  if (tally_high_busy(launch)) return tally_hold(TALLY_HOLD_NS_MAX);
  if (launch->high_quiet_ns < quiet_ns) return tally_hold(quiet_ns - launch->high_quiet_ns);
  return tally_run(0);
}

void policy_on_event(uint64_t now_ns, const tally_event *event) {
  (void)now_ns;
  (void)event;
}
