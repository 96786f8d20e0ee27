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

/* ---- a codec: whole numbers in LEB128, and texts, as the SDKs of all languages write them ---- */

/* Writes into memory of the policy's. What does not fit is left out, and `overflowed` says so. */
typedef struct {
  uint8_t *data;
  size_t size;
  size_t length;
  bool overflowed;
} tally_writer;

static inline void tally_write_byte(tally_writer *out, uint8_t byte) {
  if (out->length < out->size) {
    out->data[out->length++] = byte;
  } else {
    out->overflowed = true;
  }
}
static inline void tally_write_number(tally_writer *out, uint64_t n) {
  for (; n >= 0x80; n >>= 7) tally_write_byte(out, (uint8_t)(n | 0x80));
  tally_write_byte(out, (uint8_t)n);
}
/* Its length in bytes, then UTF-8. */
static inline void tally_write_text(tally_writer *out, tally_string_t text) {
  tally_write_number(out, text.len);
  for (size_t i = 0; i < text.len; i++) tally_write_byte(out, text.ptr[i]);
}
/* What was written, for `policy_snapshot`. */
static inline tally_saved tally_written(const tally_writer *out, tally_string_t format,
                                        uint32_t version) {
  return (tally_saved){format, version, out->data, out->length};
}

/* Reads it back. `wrong` is NULL, or what was first found wrong; from then on every number is 0. */
typedef struct {
  const uint8_t *data;
  size_t length;
  size_t at;
  const char *wrong;
} tally_reader;

/* Wrong from the start if it is of another format or version. */
static inline tally_reader tally_read(const tally_saved *from, const char *format,
                                      uint32_t version) {
  const char *wrong = tally_saved_expect(from, format, version);
  if (wrong == NULL && from->version < version) wrong = "of a version that is no longer understood";
  return (tally_reader){from->data, from->length, 0, wrong};
}
static inline bool tally_read_is_done(const tally_reader *from) {
  return from->wrong != NULL || from->at == from->length;
}
static inline uint64_t tally_read_number(tally_reader *from) {
  uint64_t n = 0;
  for (unsigned shift = 0; shift < 64 && from->wrong == NULL; shift += 7) {
    if (from->at == from->length) {
      from->wrong = "it ends within a number";
      return 0;
    }
    uint8_t byte = from->data[from->at++];
    if (shift == 63 && (byte & 0x7f) > 1) break;
    n |= (uint64_t)(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return n;
  }
  if (from->wrong == NULL) from->wrong = "a number of more than 64 bits";
  return 0;
}
/* The text stays where it is, in what is read. */
static inline tally_string_t tally_read_text(tally_reader *from) {
  uint64_t length = tally_read_number(from);
  if (from->wrong == NULL && length > from->length - from->at) {
    from->wrong = "it ends within a text";
  }
  if (from->wrong != NULL) return (tally_string_t){NULL, 0};
  tally_string_t text = {(uint8_t *)from->data + from->at, (size_t)length};
  from->at += (size_t)length;
  return text;
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
