/* The helpers of the SDK for C, on the host. Ends with 0 if all is as it should be. */
#include "tally_state.h"
#include <stdio.h>

#define CHECK(what)                                                                                \
  if (!(what)) return fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what), 1

tally_saved policy_snapshot(void) { return (tally_saved){0}; }
const char *policy_restore(const tally_saved *from) { return from->length == 0 ? NULL : "no"; }

static const uint8_t SAMPLE[] = {0x03, 0xf0, 0xa2, 0x04, 0x03, 'a', 0xc3, 0xa9};

static int state(void) {
  uint8_t data[64];
  tally_writer out = {data, sizeof data, 0, false};
  tally_write_number(&out, 3);
  tally_write_number(&out, 70000);
  tally_write_text(&out, TALLY_TEXT("a\xc3\xa9"));
  CHECK(out.length == sizeof SAMPLE && memcmp(data, SAMPLE, sizeof SAMPLE) == 0);
  tally_write_number(&out, UINT64_MAX);
  CHECK(!out.overflowed);
  tally_saved saved = tally_written(&out, TALLY_TEXT("f"), 2);
  tally_reader from = tally_read(&saved, "f", 2);
  CHECK(tally_read_number(&from) == 3 && tally_read_number(&from) == 70000);
  tally_string_t text = tally_read_text(&from);
  CHECK(text.len == 3 && memcmp(text.ptr, "a\xc3\xa9", 3) == 0);
  CHECK(!tally_read_is_done(&from) && tally_read_number(&from) == UINT64_MAX);
  CHECK(tally_read_is_done(&from) && from.wrong == NULL);
  CHECK(tally_read_number(&from) == 0 && from.wrong != NULL);
  CHECK(tally_read(&saved, "g", 2).wrong != NULL);
  CHECK(tally_read(&saved, "f", 1).wrong != NULL && tally_read(&saved, "f", 3).wrong != NULL);

  uint8_t above[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02};
  saved = (tally_saved){TALLY_TEXT("f"), 2, above, sizeof above};
  from = tally_read(&saved, "f", 2);
  CHECK(tally_read_number(&from) == 0 && strstr(from.wrong, "more than 64 bits") != NULL);
  uint8_t long_text[] = {9, 'a'};
  saved = (tally_saved){TALLY_TEXT("f"), 2, long_text, sizeof long_text};
  from = tally_read(&saved, "f", 2);
  CHECK(tally_read_text(&from).len == 0 && from.wrong != NULL);

  out = (tally_writer){data, 1, 0, false};
  tally_write_number(&out, 300);
  CHECK(out.overflowed && out.length == 1);
  return 0;
}

TALLY_LRU(map, 64);

static int lru(void) {
  bool is_new;
  for (uint32_t key = 0; key < 64; key++) {
    tally_lru_place(&map, key, &is_new);
    CHECK(is_new);
  }
  size_t first = tally_lru_place(&map, 7, &is_new);
  CHECK(!is_new && first < 64);
  /* Its set is full, and key 7 was used last: 23 makes room. */
  size_t other = tally_lru_place(&map, 7 + 64, &is_new);
  CHECK(is_new && other != first);
  CHECK(tally_lru_place(&map, 7, &is_new) == first && !is_new);
  CHECK(tally_lru_place(&map, 23, &is_new) != first && is_new);
  for (uint32_t key = 0; key < 100000; key++) {
    CHECK(tally_lru_place(&map, key * 2654435761u, &is_new) < 64);
  }
  return 0;
}

static int bucket(void) {
  tally_bucket share = {333, 0, 8000};
  int spent = 0;
  for (int n = 0; n < 1000; n++) {
    tally_bucket_earn(&share);
    spent += tally_bucket_spend(&share);
  }
  CHECK(spent == 333);
  return 0;
}

int main(void) { return state() || lru() || bucket(); }
