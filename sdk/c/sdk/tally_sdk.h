/* What a Tally scheduling policy in C is written with.
 *
 * A policy implements `policy_init`, `policy_decide` and `policy_on_event` below. What it
 * may ask of the core is in tally.h, generated from the contract, as
 * `tally_policy_host_...`; what fields, decisions and events mean is written in
 * wit/policy.wit, and there only.
 *
 * Rules of the house: the same inputs give the same decisions (there is no clock, no
 * file, no randomness); a decision has 200 000 units of fuel, about as many instructions;
 * what traps (a wild pointer, `abort`) costs the policy its turn and its memory. */
#ifndef TALLY_SDK_H
#define TALLY_SDK_H

#include "tally.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef tally_policy_types_client_id_t tally_client;
typedef exports_tally_policy_scheduler_launch_t tally_launch;
typedef exports_tally_policy_scheduler_decision_t tally_decision;
typedef exports_tally_policy_scheduler_event_t tally_event;

/* The longest a launch is held before it is offered again: "until something changes". */
#define TALLY_HOLD_NS_MAX UINT64_C(1000000000)

/* ---- what a policy implements ---- */

/* Called once, with the text of the configuration, which is not zero-terminated and goes
 * after the call. NULL: fine. Else a message, which refuses the load and is shown to the
 * operator. */
const char *policy_init(tally_string_t config);
/* Decide one launch. */
tally_decision policy_decide(const tally_launch *launch);
/* Something happened: see `event->tag`. What is in an event goes after the call. */
void policy_on_event(uint64_t now_ns, const tally_event *event);

/* ---- answers ---- */

/* Run it as it is; so many further launches of this client go without a question. */
static inline tally_decision tally_run(uint32_t lease) {
  tally_decision d = {.tag = TALLY_POLICY_TYPES_DECISION_RUN};
  d.val.run = lease;
  return d;
}
/* Not now: offered again after so long, or when something changes. */
static inline tally_decision tally_hold(uint64_t ns) {
  tally_decision d = {.tag = TALLY_POLICY_TYPES_DECISION_HOLD};
  d.val.hold = ns;
  return d;
}
/* As launches of so many blocks (at least 1). */
static inline tally_decision tally_slice(uint32_t blocks) {
  tally_decision d = {.tag = TALLY_POLICY_TYPES_DECISION_SLICE};
  d.val.slice = blocks;
  return d;
}
/* So that it can be asked to give way at block boundaries. */
static inline tally_decision tally_preemptible(void) {
  tally_decision d = {.tag = TALLY_POLICY_TYPES_DECISION_PREEMPTIBLE};
  return d;
}
/* On so many SMs (at least 1). */
static inline tally_decision tally_partition(uint32_t sms) {
  tally_decision d = {.tag = TALLY_POLICY_TYPES_DECISION_PARTITION};
  d.val.partition = sms;
  return d;
}

/* ---- what is asked of a launch most often ---- */

static inline bool tally_is_high(const tally_launch *launch) {
  return launch->class_ == TALLY_POLICY_TYPES_PRIORITY_CLASS_HIGH;
}
static inline bool tally_high_busy(const tally_launch *launch) {
  return (launch->flags & TALLY_POLICY_TYPES_LAUNCH_FLAGS_HIGH_BUSY) != 0;
}
static inline bool tally_can_slice(const tally_launch *launch) {
  return (launch->flags & TALLY_POLICY_TYPES_LAUNCH_FLAGS_CAN_SLICE) != 0;
}
static inline bool tally_can_preempt(const tally_launch *launch) {
  return (launch->flags & TALLY_POLICY_TYPES_LAUNCH_FLAGS_CAN_PREEMPT) != 0;
}

/* ---- log ---- */

/* One line; at most 64 a second are kept. */
void tally_log(tally_policy_types_level_t level, const char *line);

/* ---- configuration: lines of `key = value` ----
 *
 * Read it, ask for every key there is, finish. The first thing wrong is kept and comes
 * out of `tally_config_finish`, which also refuses what was not asked for. */

#define TALLY_CONFIG_KEYS_MAX 32

typedef struct {
  tally_string_t keys[TALLY_CONFIG_KEYS_MAX];
  tally_string_t values[TALLY_CONFIG_KEYS_MAX];
  bool asked[TALLY_CONFIG_KEYS_MAX];
  size_t count;
  const char *wrong;
} tally_config;

void tally_config_read(tally_config *config, tally_string_t text);
/* A whole number; what `value` points to stays as it is if the key is absent. */
void tally_config_integer(tally_config *config, const char *key, uint64_t *value, uint64_t least,
                          uint64_t most);
/* `true` or `false`, likewise. */
void tally_config_boolean(tally_config *config, const char *key, bool *value);
/* NULL, or what is wrong: lives until the next call. */
const char *tally_config_finish(tally_config *config);

#endif
