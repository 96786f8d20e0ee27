/* Best-effort launches wait while high-priority work is there and for `idle_gap_us` after it.
 * With `lease` = N, N further launches of a client then go without a question, until
 * high-priority work appears. The same in four languages: sdk/<language>/examples/idle-gap. */
#define TALLY_ACTIVITY policy_high_started, policy_high_ended
#define TALLY_MEMBERSHIP policy_joined, policy_left
#include "tally_events.h"

#define LEASED_MAX 1024 /* clients with a lease at once; further ones get none */

static uint64_t idle_gap_ns, lease;
static tally_client leased[LEASED_MAX];
static size_t leased_count;

const char *policy_init(tally_string_t text) {
  tally_config config;
  uint64_t idle_gap_us = 100;
  tally_config_read(&config, text);
  tally_config_integer(&config, "idle_gap_us", &idle_gap_us, 0, 1000000);
  tally_config_integer(&config, "lease", &lease, 0, 1000000);
  idle_gap_ns = idle_gap_us * 1000;
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

tally_answer policy_decide(const tally_launch *launch) {
  if (tally_is_high(launch)) return tally_run(0);
  if (tally_high_active(launch)) return tally_hold(TALLY_HOLD_UNTIL_CHANGE);
  if (launch->high_idle_ns < idle_gap_ns) return tally_hold(idle_gap_ns - launch->high_idle_ns);
  return tally_run(lease > 0 && note(launch->client) ? (uint32_t)lease : 0);
}

void policy_high_started(uint64_t now_ns) {
  (void)now_ns;
  for (size_t i = 0; i < leased_count; i++) tally_policy_control_revoke_lease(leased[i]);
  leased_count = 0;
}

void policy_high_ended(uint64_t now_ns) { (void)now_ns; }

void policy_joined(uint64_t now_ns, const tally_member *client) {
  (void)now_ns;
  (void)client;
}

void policy_left(uint64_t now_ns, tally_client client) {
  (void)now_ns;
  size_t kept = 0;
  for (size_t i = 0; i < leased_count; i++) {
    if (leased[i] != client) leased[kept++] = leased[i];
  }
  leased_count = kept;
}
