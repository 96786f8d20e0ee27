/* Best-effort launches run while no unit of a service is open, or while the open ones can lose the time that the launch
 * is predicted to take and `margin_us` more; else they wait, unless the GPU has had no high-priority work for 2 ms.
 * With `width_percent` below 100 a best-effort client runs on at most that share of the SMs. The counter
 * `units_late` counts units that took longer than their objective. The same in four languages:
 * sdk/<language>/examples/slack. */
#define TALLY_MEMBERSHIP policy_joined, policy_left
#define TALLY_UNITS policy_unit_began, policy_units_ended
#include "tally_events.h"

#define IDLE_NS 2000000 /* high priority has been idle for so long: nobody waits for it */
#define NEW_MAX 1024 /* clients that join before the next decision; further ones get no width */

static uint64_t unknown_ns, margin_ns, width_percent = 100;
static tally_client new_clients[NEW_MAX]; /* best-effort clients that have not been given a width yet */
static size_t new_count;
static bool refused; /* the log says already that there is no width for them */
static uint32_t units_late;

const char *policy_init(tally_string_t text) {
  tally_config config;
  uint64_t unknown_us = 2000, margin_us = 200;
  tally_config_read(&config, text);
  tally_config_integer(&config, "unknown_us", &unknown_us, 0, 1000000);
  tally_config_integer(&config, "margin_us", &margin_us, 0, 1000000);
  tally_config_integer(&config, "width_percent", &width_percent, 1, 100);
  unknown_ns = unknown_us * 1000;
  margin_ns = margin_us * 1000;
  tally_string_t name = TALLY_TEXT("units_late");
  units_late = tally_policy_metrics_counter(&name);
  return tally_config_finish(&config);
}

/* Give new clients their width: the largest of at most `width_percent` of the SMs. */
static void set_widths(uint32_t sm_count) {
  uint32_t sms = 0;
  tally_list_u32_t all;
  tally_policy_widths_all(&all);
  for (size_t i = 0; i < all.len; i++) {
    if ((uint64_t)all.ptr[i] * 100 <= sm_count * width_percent) sms = all.ptr[i];
  }
  tally_list_u32_free(&all);
  if (sms == 0 && !refused) {
    refused = true;
    tally_log(TALLY_POLICY_LOG_LEVEL_WARN, "width_percent: launches cannot be limited to so few SMs");
  }
  for (size_t i = 0; i < new_count && sms > 0; i++) tally_policy_widths_set(new_clients[i], sms);
  new_count = 0;
}

tally_answer policy_decide(const tally_launch *launch) {
  if (tally_is_high(launch)) return tally_run(0);
  /* Not in `policy_joined`: only a launch says how many SMs there are. */
  if (new_count > 0 && launch->sm_count > 0) set_widths(launch->sm_count);
  if (launch->high_clients == 0) return tally_run(0);
  int64_t slack_ns = tally_policy_services_slack_ns(launch->now_ns);
  uint64_t needed_ns = launch->predicted_ns != TALLY_UNKNOWN ? launch->predicted_ns : unknown_ns;
  needed_ns = needed_ns < UINT64_MAX - margin_ns ? needed_ns + margin_ns : UINT64_MAX;
  if (slack_ns == TALLY_NO_UNIT_OPEN || (slack_ns >= 0 && (uint64_t)slack_ns >= needed_ns)) return tally_run(0);
  if (launch->high_idle_ns >= IDLE_NS) return tally_run(0);
  return tally_hold(tally_high_active(launch) ? TALLY_HOLD_UNTIL_CHANGE : IDLE_NS - launch->high_idle_ns);
}

void policy_joined(uint64_t now_ns, const tally_member *client) {
  (void)now_ns;
  bool wanted = client->class_ == TALLY_POLICY_TYPES_PRIORITY_CLASS_BEST_EFFORT && width_percent < 100;
  if (wanted && new_count < NEW_MAX) new_clients[new_count++] = client->id;
}

void policy_left(uint64_t now_ns, tally_client client) {
  (void)now_ns;
  size_t kept = 0;
  for (size_t i = 0; i < new_count; i++) {
    if (new_clients[i] != client) new_clients[kept++] = new_clients[i];
  }
  new_count = kept;
}

void policy_unit_began(uint64_t now_ns, tally_client client, uint64_t since_ns, uint64_t deadline_ns) {
  (void)now_ns;
  (void)client;
  (void)since_ns;
  (void)deadline_ns;
}

void policy_units_ended(uint64_t now_ns, tally_client client, uint32_t units, uint64_t took_ns) {
  (void)now_ns;
  tally_policy_services_service_t service;
  if (!tally_policy_services_get(client, &service) || !service.objective.is_some) return;
  if (took_ns > service.objective.val.slo_ns) tally_policy_metrics_counter_add(units_late, units);
}
