/* Best-effort launches wait while high-priority work is there and for `quiet_us` after it.
 * With `lease` = N, N further launches of a client then go without a question, until
 * high-priority work appears. The same in four languages: sdk/<language>/examples/quiet. */
#include "tally_sdk.h"

#define LEASED_MAX 1024 /* clients with a lease at once; further ones get none */

static uint64_t quiet_ns, lease;
static tally_client leased[LEASED_MAX];
static size_t leased_count;

const char *policy_init(tally_string_t text) {
  tally_config config;
  uint64_t quiet_us = 100;
  tally_config_read(&config, text);
  tally_config_integer(&config, "quiet_us", &quiet_us, 0, 1000000);
  tally_config_integer(&config, "lease", &lease, 0, 1000000);
  quiet_ns = quiet_us * 1000;
  if (lease > 0) tally_policy_host_subscribe(TALLY_POLICY_TYPES_SUBSCRIPTION_HIGH_ACTIVITY);
  return tally_config_finish(&config);
}

/* Note that a client has a lease; false if there is no room to. */
static bool note(tally_client client) {
  for (size_t i = 0; i < leased_count; i++) {
    if (leased[i] == client) return true;
  }
  if (leased_count == LEASED_MAX) return false;
  leased[leased_count++] = client;
  return true;
}

static void forget(tally_client client) {
  size_t kept = 0;
  for (size_t i = 0; i < leased_count; i++) {
    if (leased[i] != client) leased[kept++] = leased[i];
  }
  leased_count = kept;
}

tally_decision policy_decide(const tally_launch *launch) {
  if (tally_is_high(launch)) return tally_run(0);
  if (tally_high_busy(launch)) return tally_hold(TALLY_HOLD_NS_MAX);
  if (launch->high_quiet_ns < quiet_ns) return tally_hold(quiet_ns - launch->high_quiet_ns);
  return tally_run(lease > 0 && note(launch->client) ? (uint32_t)lease : 0);
}

void policy_on_event(uint64_t now_ns, const tally_event *event) {
  (void)now_ns;
  if (event->tag == TALLY_POLICY_TYPES_EVENT_HIGH_BUSY) {
    for (size_t i = 0; i < leased_count; i++) tally_policy_host_revoke_lease(leased[i]);
    leased_count = 0;
  } else if (event->tag == TALLY_POLICY_TYPES_EVENT_CLIENT_LEFT) {
    forget(event->val.client_left);
  }
}
