/* For a policy that is told of events. Before including this in policy.c, name the kinds of
 * events, and implement their functions. A kind that is not named costs nothing.
 *
 *     #define TALLY_ACTIVITY     policy_high_started, policy_high_ended
 *     #define TALLY_UNITS        policy_unit_began, policy_units_ended
 *     #define TALLY_COMPLETIONS  policy_completed
 *     #define TALLY_MEMBERSHIP   policy_joined, policy_left
 *     #define TALLY_TIMER        policy_fired
 *
 * What they mean is written in wit/policy.wit, at the interfaces of these names. `tallyctl
 * policy wrap` sees which ones are there. */
#ifndef TALLY_EVENTS_H
#define TALLY_EVENTS_H

#include "tally_sdk.h"

/* The contract wants these exported; their parameters travel one by one. */
#define TALLY_EVENT_(interface, function) \
  __attribute__((__export_name__("tally:policy/" interface "@0.1.0#" function)))

#ifdef TALLY_ACTIVITY
void policy_high_started(uint64_t now_ns);
void policy_high_ended(uint64_t now_ns);

TALLY_EVENT_("activity", "high-started") void tally_high_started_(uint64_t now_ns) {
  policy_high_started(now_ns);
}
TALLY_EVENT_("activity", "high-ended") void tally_high_ended_(uint64_t now_ns) {
  policy_high_ended(now_ns);
}
#endif

#ifdef TALLY_UNITS
void policy_unit_began(uint64_t now_ns, tally_client client, uint64_t since_ns, uint64_t deadline_ns);
void policy_units_ended(uint64_t now_ns, tally_client client, uint32_t units, uint64_t took_ns);

TALLY_EVENT_("units", "began")
void tally_unit_began_(uint64_t now_ns, uint32_t client, uint64_t since_ns, uint64_t deadline_ns) {
  policy_unit_began(now_ns, client, since_ns, deadline_ns);
}
TALLY_EVENT_("units", "ended")
void tally_units_ended_(uint64_t now_ns, uint32_t client, uint32_t units, uint64_t took_ns) {
  policy_units_ended(now_ns, client, units, took_ns);
}
#endif

#ifdef TALLY_COMPLETIONS
typedef struct {
  tally_client client;
  tally_policy_types_kernel_id_t kernel;
  tally_policy_types_form_t form;
  uint32_t argument;
  uint64_t predicted_ns, measured_ns, charged_ns;
} tally_completion;

void policy_completed(uint64_t now_ns, const tally_completion *completion);

TALLY_EVENT_("completions", "completed")
void tally_completed_(uint64_t now_ns, uint32_t client, uint32_t kernel, uint32_t form, uint32_t argument,
                      uint64_t predicted_ns, uint64_t measured_ns, uint64_t charged_ns) {
  tally_completion completion = {client,   kernel,       (tally_policy_types_form_t)form,
                                 argument, predicted_ns, measured_ns,
                                 charged_ns};
  policy_completed(now_ns, &completion);
}
#endif

#ifdef TALLY_MEMBERSHIP
typedef tally_policy_types_client_t tally_member;

void policy_joined(uint64_t now_ns, const tally_member *client);
void policy_left(uint64_t now_ns, tally_client client);

TALLY_EVENT_("membership", "joined")
void tally_joined_(uint64_t now_ns, uint32_t id, uint32_t class_, uint32_t weight) {
  tally_member client = {id, (tally_policy_types_priority_class_t)class_, weight};
  policy_joined(now_ns, &client);
}
TALLY_EVENT_("membership", "left") void tally_left_(uint64_t now_ns, uint32_t client) {
  policy_left(now_ns, client);
}
#endif

#ifdef TALLY_TIMER
void policy_fired(uint64_t now_ns, uint64_t token);

TALLY_EVENT_("timer", "fired") void tally_fired_(uint64_t now_ns, uint64_t token) {
  policy_fired(now_ns, token);
}
#endif

#endif
