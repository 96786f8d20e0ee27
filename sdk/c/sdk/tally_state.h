/* For a policy that keeps what it learned over a reload: include this in policy.c, and
 * implement `policy_snapshot` and `policy_restore`. `tallyctl policy wrap` sees that they are
 * there. What both mean is written in wit/policy.wit, at `interface state`. */
#ifndef TALLY_STATE_H
#define TALLY_STATE_H

#include "tally_sdk.h"
#include <stdlib.h>
#include <string.h>

/* What a policy knows, in a format of its own. */
typedef struct {
  tally_string_t format; /* names the format, by convention after the policy */
  uint32_t version;      /* rises when the format changes */
  const uint8_t *data;
  size_t length; /* at most 256 KiB */
} tally_saved;

/* Write down what was learned. What `data` points to stays the policy's, and as it is until
 * the next call. Decisions wait: it has 5 million units of fuel. */
tally_saved policy_snapshot(void);
/* Go on from what another one wrote down; called once, right after `policy_init`. What is
 * in `from` goes after the call. NULL: taken. Else why not: the policy starts without it,
 * and the operator is told. */
const char *policy_restore(const tally_saved *from);

/* NULL if it is of this format and no later version; else what is wrong. */
static inline const char *tally_saved_expect(const tally_saved *from, const char *format,
                                             uint32_t version_max) {
  size_t length = strlen(format);
  if (from->format.len != length || memcmp(from->format.ptr, format, length) != 0) {
    return "saved by another policy";
  }
  return from->version > version_max ? "of a later version than this one knows" : NULL;
}

/* ---- what the contract wants exported, by the component model's ABI ---- */

struct tally_state_saved_ {
  const uint8_t *format;
  size_t format_length;
  uint32_t version;
  const uint8_t *data;
  size_t length;
};

struct tally_state_result_ {
  uint32_t refused; /* the first byte counts */
  const char *why;
  size_t why_length;
};

__attribute__((__export_name__("tally:policy/state@0.1.0#snapshot")))
struct tally_state_saved_ *tally_state_snapshot_(void) {
  static struct tally_state_saved_ area;
  tally_saved saved = policy_snapshot();
  area = (struct tally_state_saved_){saved.format.ptr, saved.format.len, saved.version, saved.data,
                                     saved.length};
  return &area;
}

__attribute__((__export_name__("tally:policy/state@0.1.0#restore")))
struct tally_state_result_ *tally_state_restore_(uint8_t *format, size_t format_length,
                                                 uint32_t version, uint8_t *data, size_t length) {
  static struct tally_state_result_ area;
  tally_saved from = {{format, format_length}, version, data, length};
  const char *why = policy_restore(&from);
  if (format_length > 0) free(format);
  if (length > 0) free(data);
  area = (struct tally_state_result_){why != NULL, why, why != NULL ? strlen(why) : 0};
  return &area;
}

#endif
