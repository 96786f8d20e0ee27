/* Best-effort launches wait while high-priority work is there, and after it for as long as
 * the longest pause between two pieces of it was so far, at most `most_us`: it learns how
 * long to be patient, and a reload does not make it forget. The same in four languages:
 * sdk/<language>/examples/patient, and each takes what another saved. */
#include "tally_sdk.h"
#include "tally_state.h"

static uint64_t most_ns, pause_ns, idle_since_ns;
static bool idle;
static uint32_t shown; /* the same for `tallyctl status` */

static void learn(uint64_t pause) {
  if (pause > most_ns) pause = most_ns;
  if (pause > pause_ns) pause_ns = pause;
  tally_policy_host_gauge_set(shown, (int64_t)pause_ns);
}

const char *policy_init(tally_string_t text) {
  tally_config config;
  uint64_t most_us = 1000;
  tally_config_read(&config, text);
  tally_config_integer(&config, "most_us", &most_us, 0, 100000);
  most_ns = most_us * 1000;
  tally_policy_host_subscribe(TALLY_POLICY_TYPES_SUBSCRIPTION_HIGH_ACTIVITY);
  tally_string_t name = TALLY_TEXT("pause_ns");
  shown = tally_policy_host_gauge(&name);
  return tally_config_finish(&config);
}

tally_decision policy_decide(const tally_launch *launch) {
  if (tally_is_high(launch)) return tally_run(0);
  if (tally_high_busy(launch)) return tally_hold(TALLY_HOLD_NS_MAX);
  if (launch->high_quiet_ns < pause_ns) return tally_hold(pause_ns - launch->high_quiet_ns);
  return tally_run(0);
}

void policy_on_event(uint64_t now_ns, const tally_event *event) {
  if (event->tag == TALLY_POLICY_TYPES_EVENT_HIGH_IDLE) {
    idle = true;
    idle_since_ns = now_ns;
  } else if (event->tag == TALLY_POLICY_TYPES_EVENT_HIGH_BUSY && idle) {
    idle = false;
    learn(now_ns > idle_since_ns ? now_ns - idle_since_ns : 0);
  }
}

/* Little-endian, as WebAssembly is: `pause_ns` as it stands. */
tally_saved policy_snapshot(void) {
  return (tally_saved){TALLY_TEXT("patient"), 1, (const uint8_t *)&pause_ns, sizeof pause_ns};
}

const char *policy_restore(const tally_saved *from) {
  const char *wrong = tally_saved_expect(from, "patient", 1);
  if (wrong != NULL) return wrong;
  if (from->length != sizeof pause_ns) return "expected 8 bytes";
  uint64_t pause;
  memcpy(&pause, from->data, sizeof pause);
  learn(pause);
  return NULL;
}
