/* What a Tally scheduling policy in C is written with.
 *
 * A policy implements `policy_init` and `policy_decide` below, and what it includes of
 * tally_events.h and tally_state.h. What it may ask of the core is in tally.h, generated from
 * the contract, as `tally_policy_INTERFACE_FUNCTION`; what fields, decisions and events mean is
 * written in wit/policy.wit. A component imports the interfaces whose functions it calls:
 * `identity`, `kernel_identity` and `high_priority` have to be granted by the operator.
 *
 * The same inputs must give the same decisions: there is no clock, no file, no randomness. A
 * decision has 200 000 units of fuel, about as many instructions. What traps (a wild pointer,
 * `abort`) costs the policy its turn and its memory. */
#ifndef TALLY_SDK_H
#define TALLY_SDK_H

#include "tally.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef tally_policy_types_client_id_t tally_client;
typedef exports_tally_policy_scheduler_launch_t tally_launch;
typedef exports_tally_policy_scheduler_decision_t tally_decision;
typedef exports_tally_policy_scheduler_answer_t tally_answer;

/* A time that has not come: no high-priority activity yet, no launch waiting. */
#define TALLY_NEVER UINT64_MAX
/* A time or a number that is not known. */
#define TALLY_UNKNOWN UINT64_C(0)
/* `measured_ns` of a launch whose GPU time could not be told from that of others. */
#define TALLY_NOT_MEASURED UINT64_C(0)
/* The kernel id of all kernels beyond those that the core tells apart. */
#define TALLY_NO_KERNEL UINT32_MAX
/* Hold for as long as the core allows: until something changes. */
#define TALLY_HOLD_UNTIL_CHANGE UINT64_MAX
/* A window that holds nothing back. */
#define TALLY_WINDOW_OPEN UINT64_MAX
/* A decision without a reason. */
#define TALLY_NO_REASON 0
/* The slack while no client with an objective has a unit open. */
#define TALLY_NO_UNIT_OPEN INT64_MAX
/* Units of work, or tokens, behind a service's `recent`, `p50_ns` and `p99_ns`. */
#define TALLY_RECENT_UNITS 256
/* Launches behind a `p50_ns` and a `p99_ns`. */
#define TALLY_RECENT_SAMPLES 32

/* A text of the program as the bindings want it. */
#define TALLY_TEXT(text) ((tally_string_t){(uint8_t *)(text), sizeof(text) - 1})

/* ---- what a policy implements ---- */

/* Called once, with the text of the configuration, which is not zero-terminated and goes
 * after the call. NULL: fine. Else a message, which refuses the load and is shown to the
 * operator. */
const char *policy_init(tally_string_t config);
/* Decide one launch. */
tally_answer policy_decide(const tally_launch *launch);

/* ---- answers ---- */

/* Run it whole; so many further launches of this client go without a question. */
static inline tally_answer tally_run(uint32_t lease) {
  tally_answer a = {.decision = {.tag = EXPORTS_TALLY_POLICY_SCHEDULER_DECISION_RUN}};
  a.decision.val.run = lease;
  return a;
}
/* Not now: offered again after so long, or when something changes. */
static inline tally_answer tally_hold(uint64_t ns) {
  tally_answer a = {.decision = {.tag = EXPORTS_TALLY_POLICY_SCHEDULER_DECISION_HOLD}};
  a.decision.val.hold = ns;
  return a;
}
/* The same, and when a launch of another best-effort client ends. */
static inline tally_answer tally_hold_until_completion(uint64_t ns) {
  tally_answer a = {.decision = {.tag = EXPORTS_TALLY_POLICY_SCHEDULER_DECISION_HOLD_UNTIL_COMPLETION}};
  a.decision.val.hold_until_completion = ns;
  return a;
}
/* As launches of so many blocks (at least 1). */
static inline tally_answer tally_sliced(uint32_t blocks) {
  tally_answer a = {.decision = {.tag = EXPORTS_TALLY_POLICY_SCHEDULER_DECISION_SLICED}};
  a.decision.val.sliced = blocks;
  return a;
}
/* So that it can be asked to yield at block boundaries. */
static inline tally_answer tally_preemptible(void) {
  tally_answer a = {.decision = {.tag = EXPORTS_TALLY_POLICY_SCHEDULER_DECISION_PREEMPTIBLE}};
  return a;
}
/* On so many SMs (at least 1). */
static inline tally_answer tally_sm_limited(uint32_t sms) {
  tally_answer a = {.decision = {.tag = EXPORTS_TALLY_POLICY_SCHEDULER_DECISION_SM_LIMITED}};
  a.decision.val.sm_limited = sms;
  return a;
}
/* The same answer with a reason; `tally_policy_reasons_define` gives it a text. */
static inline tally_answer tally_because(tally_answer answer, uint8_t reason) {
  answer.reason = reason;
  return answer;
}

/* ---- what is asked of a launch most often ---- */

static inline bool tally_is_high(const tally_launch *launch) {
  return (launch->state & EXPORTS_TALLY_POLICY_SCHEDULER_LAUNCH_STATE_HIGH_PRIORITY) != 0;
}
static inline bool tally_high_active(const tally_launch *launch) {
  return (launch->state & EXPORTS_TALLY_POLICY_SCHEDULER_LAUNCH_STATE_HIGH_ACTIVE) != 0;
}
static inline bool tally_can_slice(const tally_launch *launch) {
  return (launch->offered & EXPORTS_TALLY_POLICY_SCHEDULER_FORMS_OFFERED_SLICED) != 0;
}
static inline bool tally_can_preempt(const tally_launch *launch) {
  return (launch->offered & EXPORTS_TALLY_POLICY_SCHEDULER_FORMS_OFFERED_PREEMPTIBLE) != 0;
}
static inline bool tally_can_limit(const tally_launch *launch) {
  return (launch->offered & EXPORTS_TALLY_POLICY_SCHEDULER_FORMS_OFFERED_SM_LIMITED) != 0;
}

/* ---- counters that call the core once in 256 ---- */

typedef struct {
  uint32_t id;
  uint32_t held;
} tally_counter;

/* A counter of this name; see `tally_policy_metrics_counter`. */
static inline tally_counter tally_counter_new(tally_string_t name) {
  return (tally_counter){tally_policy_metrics_counter(&name), 0};
}
/* Hand over what is held, for example in an event. */
static inline void tally_counter_hand_over(tally_counter *counter) {
  if (counter->held > 0) tally_policy_metrics_counter_add(counter->id, counter->held);
  counter->held = 0;
}
/* One more. */
static inline void tally_count(tally_counter *counter) {
  if (++counter->held >= 256) tally_counter_hand_over(counter);
}

/* ---- a bounded share, without randomness ---- */

/* Every event earns `permille`, a unit costs 1000, at most `burst` thousandths are saved up. */
typedef struct {
  uint64_t permille, credit, burst;
} tally_bucket;

static inline void tally_bucket_earn(tally_bucket *bucket) {
  bucket->credit += bucket->permille;
  if (bucket->credit > bucket->burst) bucket->credit = bucket->burst;
}
/* Spend a unit, if there is one. */
static inline bool tally_bucket_spend(tally_bucket *bucket) {
  if (bucket->credit < 1000) return false;
  bucket->credit -= 1000;
  return true;
}

/* ---- a map of bounded size that forgets what was not used for longest ----
 *
 * It gives each key (of a kernel, of a client) a place in an array of values that the policy has:
 *
 *     static struct known values[1024];
 *     TALLY_LRU(kernels, 1024);
 *
 *     bool is_new;
 *     struct known *value = &values[tally_lru_place(&kernels, launch->kernel, &is_new)];
 *     if (is_new) *value = (struct known){0};
 *
 * A key gives its set of four places; in a full set the one not used for longest makes room. */

#define TALLY_LRU_WAYS 4

typedef struct {
  uint32_t *keys;
  uint64_t *used; /* when each was last used; 0: free */
  size_t capacity;
  uint64_t uses;
} tally_lru;

/* An empty one; `capacity` is a multiple of 4. */
#define TALLY_LRU(name, capacity)                                                                  \
  _Static_assert((capacity) > 0 && (capacity) % TALLY_LRU_WAYS == 0, "a multiple of 4");           \
  static uint32_t name##_keys_[capacity];                                                          \
  static uint64_t name##_used_[capacity];                                                          \
  static tally_lru name = {name##_keys_, name##_used_, capacity, 0}

static inline size_t tally_lru_place(tally_lru *map, uint32_t key, bool *is_new) {
  size_t first = key % (map->capacity / TALLY_LRU_WAYS) * TALLY_LRU_WAYS, at = first;
  *is_new = true;
  for (size_t i = first; i < first + TALLY_LRU_WAYS && *is_new; i++) {
    *is_new = map->used[i] == 0 || map->keys[i] != key;
    if (!*is_new || map->used[i] < map->used[at]) at = i;
  }
  map->keys[at] = key;
  map->used[at] = ++map->uses;
  return at;
}

/* ---- log ---- */

/* One line; at most 64 a second are kept. */
void tally_log(tally_policy_log_level_t level, const char *line);

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
