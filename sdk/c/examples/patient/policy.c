/* Best-effort launches wait while high-priority work is there, and after it for as long as
 * the longest pause between two pieces of it was so far, at most `most_us`: it learns how
 * long to be patient, and a reload does not make it forget. The same in four languages:
 * sdk/<language>/examples/patient, and each takes what another saved. */
#define TALLY_ACTIVITY policy_high_started, policy_high_ended
#include "tally_events.h"
#include "tally_state.h"

static uint64_t most_ns, pause_ns, idle_since_ns;
static bool idle;
static uint32_t shown; /* the same for `tallyctl status` */

static void learn(uint64_t pause) {
  if (pause > most_ns) pause = most_ns;
  if (pause > pause_ns) pause_ns = pause;
  tally_policy_metrics_gauge_set(shown, (int64_t)pause_ns);
}

const char *policy_init(tally_string_t text) {
  tally_config config;
  uint64_t most_us = 1000;
  tally_config_read(&config, text);
  tally_config_integer(&config, "most_us", &most_us, 0, 100000);
  most_ns = most_us * 1000;
  tally_string_t name = TALLY_TEXT("pause_ns");
  shown = tally_policy_metrics_gauge(&name);
  return tally_config_finish(&config);
}

tally_answer policy_decide(const tally_launch *launch) {
  if (tally_is_high(launch)) return tally_run(0);
  if (tally_high_active(launch)) return tally_hold(TALLY_HOLD_UNTIL_CHANGE);
  if (launch->high_idle_ns < pause_ns) return tally_hold(pause_ns - launch->high_idle_ns);
  return tally_run(0);
}

void policy_high_ended(uint64_t now_ns) {
  idle = true;
  idle_since_ns = now_ns;
}

void policy_high_started(uint64_t now_ns) {
  if (idle) learn(now_ns > idle_since_ns ? now_ns - idle_since_ns : 0);
  idle = false;
}

tally_saved policy_snapshot(void) {
  static uint8_t data[10];
  tally_writer out = {data, sizeof data, 0, false};
  tally_write_number(&out, pause_ns);
  return tally_written(&out, TALLY_TEXT("patient"), 1);
}

const char *policy_restore(const tally_saved *saved) {
  tally_reader from = tally_read(saved, "patient", 1);
  uint64_t pause = tally_read_number(&from);
  if (from.wrong == NULL) learn(pause);
  return from.wrong;
}
