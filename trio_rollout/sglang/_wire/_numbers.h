/* JSON's numbers as token ids and log-probs. Whatever is unusual is refused (0 is returned), never misread. */

#include <stdint.h>
#include <string.h>

typedef struct {
    const char *at, *end;
} Text;

static inline char peek(const Text *text)
{
    return text->at < text->end ? *text->at : '\0'; /* no byte of JSON is NUL */
}

static inline char skip_space(Text *text)
{
    char byte;
    while ((byte = peek(text)) == ' ' || byte == '\n' || byte == '\r' || byte == '\t')
        text->at++;
    return byte;
}

static inline int take(Text *text, char wanted)
{
    if (skip_space(text) != wanted)
        return 0;
    text->at++;
    return 1;
}

/* How many of the eight bytes begin the digits of a number, and their value: pairs of bytes, of pairs and of fours are added
   up in one step each, whatever their number, so that no jump depends on it. */
#if PY_LITTLE_ENDIAN && defined(__GNUC__)
static inline int eight_digits(const char *at, uint64_t *value)
{
    uint64_t bytes;
    memcpy(&bytes, at, 8);
    bytes ^= UINT64_C(0x3030303030303030);
    uint64_t others = (bytes | (bytes + UINT64_C(0x7676767676767676))) & UINT64_C(0x8080808080808080);
    int count = others != 0 ? __builtin_ctzll(others) / 8 : 8;
    bytes = bytes << (32 - 4 * count) << (32 - 4 * count); /* zeros in front, which are the low bytes */
    bytes = (bytes * 10 + (bytes >> 8)) & UINT64_C(0x00FF00FF00FF00FF);
    bytes = (bytes * 100 + (bytes >> 16)) & UINT64_C(0x0000FFFF0000FFFF);
    *value = (bytes * 10000 + (bytes >> 32)) & UINT64_C(0xFFFFFFFF);
    return count;
}
#endif

/* Appends digits to a value. Returns how many; 0 if there are none, more than 80, or more than 19 behind leading zeros. */
static inline int read_digits(Text *text, uint64_t *value)
{
    static const uint64_t tens[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};
    static const uint64_t limits[] = {UINT64_C(10000000000000000000), UINT64_C(1000000000000000000),
                                      UINT64_C(100000000000000000), UINT64_C(10000000000000000), UINT64_C(1000000000000000),
                                      UINT64_C(100000000000000), UINT64_C(10000000000000), UINT64_C(1000000000000),
                                      UINT64_C(100000000000)};
    const char *begin = text->at, *at = begin;
    uint64_t total = *value, more;
    int fits = 1, count = 8;
#if PY_LITTLE_ENDIAN && defined(__GNUC__)
    for (; count == 8 && text->end - at >= 8; at += count) {
        count = eight_digits(at, &more);
        fits &= total < limits[count];
        total = total * tens[count] + more;
    }
#endif
    for (; at < text->end && (more = (uint64_t)(unsigned char)*at - '0') < 10; at++) {
        fits &= total < limits[1];
        total = total * 10 + more;
    }
    *value = total;
    text->at = at;
    return fits && at - begin <= 80 ? (int)(at - begin) : 0;
}

static inline int read_whole(Text *text, uint64_t *value)
{
    char first = peek(text);
    int count = read_digits(text, value);
    return count > 0 && (first != '0' || count == 1);
}

static inline int read_id(Text *text, int32_t *id)
{
    uint64_t value = 0;
    skip_space(text);
    if (!read_whole(text, &value) || value > INT32_MAX)
        return 0; /* a fraction or an exponent is refused by the caller, which expects a comma or a bracket next */
    *id = (int32_t)value;
    return 1;
}

/* The number as the pure decoder has it: rounded to a double, and that to a float.

   Here its digits (at most 19, in 64 bits) become a double, which is multiplied by a power of ten that is one too. These are
   three roundings, of 2^-53 of the value each, so that the result lies within 4 last places of the exact number, and within 5
   of the pure decoder's double. Rounding a double to a float is monotone, and its result changes only at the midpoints
   between floats: among normal floats the doubles that end in 1 and 28 zero bits. Where no midpoint is within 16 last places,
   none lies between the two doubles, and they become the same float. Where one is (once in 16 million numbers, and never in
   those that were floats before they were printed), the number is refused. */
static inline int read_log_prob(Text *text, float *log_prob)
{
    enum { LOWEST = -66, HIGHEST = 22 };
    static const double powers[] = {
        1e-66, 1e-65, 1e-64, 1e-63, 1e-62, 1e-61, 1e-60, 1e-59, 1e-58, 1e-57, 1e-56, 1e-55,
        1e-54, 1e-53, 1e-52, 1e-51, 1e-50, 1e-49, 1e-48, 1e-47, 1e-46, 1e-45, 1e-44, 1e-43,
        1e-42, 1e-41, 1e-40, 1e-39, 1e-38, 1e-37, 1e-36, 1e-35, 1e-34, 1e-33, 1e-32, 1e-31,
        1e-30, 1e-29, 1e-28, 1e-27, 1e-26, 1e-25, 1e-24, 1e-23, 1e-22, 1e-21, 1e-20, 1e-19,
        1e-18, 1e-17, 1e-16, 1e-15, 1e-14, 1e-13, 1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7,
        1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1e0, 1e1, 1e2, 1e3, 1e4, 1e5,
        1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17,
        1e18, 1e19, 1e20, 1e21, 1e22};
    uint64_t digits = 0, bits;
    int scale = 0, negative = take(text, '-');
    if (!read_whole(text, &digits) || (digits == 0 && peek(text) != '.'))
        return 0; /* -0 is the integer 0, whose float has no sign */
    if (peek(text) == '.') {
        text->at++;
        if ((scale = -read_digits(text, &digits)) == 0)
            return 0;
    }
    if ((peek(text) | 0x20) == 'e') {
        uint64_t exponent = 0;
        text->at++;
        int down = peek(text) == '-';
        text->at += down || peek(text) == '+';
        if (read_digits(text, &exponent) == 0 || exponent > 999)
            return 0;
        scale += down ? -(int)exponent : (int)exponent;
    }
    if (scale < LOWEST || scale > HIGHEST)
        return 0;
    double value = (double)digits * powers[scale - LOWEST];
    if (digits != 0) {
        memcpy(&bits, &value, sizeof bits);
        uint64_t last = bits & ((UINT64_C(1) << 29) - 1), middle = UINT64_C(1) << 28;
        if (value < 1.2e-38 || value > 3.4e38 || (middle - 16 <= last && last <= middle + 16))
            return 0; /* at the ends floats have other midpoints, or none */
    }
    *log_prob = (float)(negative ? -value : value);
    return 1;
}
