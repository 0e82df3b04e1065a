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

/* The first of eight digits is the lowest byte: pairs of bytes, of pairs and of fours are added up, each in one step. */
static inline int eight_digits(const char *at, uint64_t *value)
{
    uint64_t bytes;
    memcpy(&bytes, at, 8);
    if (((bytes & (bytes + UINT64_C(0x0606060606060606))) & UINT64_C(0xF0F0F0F0F0F0F0F0)) != UINT64_C(0x3030303030303030))
        return 0;
    bytes = (bytes & UINT64_C(0x0F0F0F0F0F0F0F0F)) * 2561 >> 8;
    bytes = (bytes & UINT64_C(0x00FF00FF00FF00FF)) * 6553601 >> 16;
    *value = (bytes & UINT64_C(0x0000FFFF0000FFFF)) * UINT64_C(42949672960001) >> 32;
    return 1;
}

/* Appends digits to a value; ``used`` counts those behind leading zeros. Returns how many there were, 80 at most, which is
   more than anybody takes: a digit is next then, and refused. */
static inline int read_digits(Text *text, uint64_t *value, int *used)
{
    const char *begin = text->at, *at = begin, *stop = text->end - begin < 80 ? text->end : begin + 80;
    uint64_t total = *value, eight;
    if (*used == 0)
        while (at < stop && *at == '0')
            at++;
    const char *first = at;
#if PY_LITTLE_ENDIAN
    for (; stop - at >= 8 && eight_digits(at, &eight); at += 8)
        total = total * 100000000 + eight;
#endif
    for (unsigned digit; at < stop && (digit = (unsigned)*at - '0') < 10; at++)
        total = total * 10 + digit;
    *value = total;
    *used += (int)(at - first);
    text->at = at;
    return (int)(at - begin);
}

static inline int read_whole(Text *text, uint64_t *value, int *used)
{
    char first = peek(text);
    int count = read_digits(text, value, used);
    return count > 0 && (first != '0' || count == 1);
}

static inline int read_id(Text *text, int32_t *id)
{
    uint64_t value = 0;
    int used = 0;
    skip_space(text);
    if (!read_whole(text, &value, &used) || used > 10 || value > INT32_MAX)
        return 0; /* a fraction or an exponent is refused by whoever expects a comma or a bracket next */
    *id = (int32_t)value;
    return 1;
}

/* The number as the pure decoder has it: rounded to a double, and that to a float.

   Here its digits (at most 19, in 64 bits) become a double, which is multiplied or divided by at most four powers of ten
   that are exact doubles. These are five roundings, of 2^-53 of the value each, so that the result lies within 6 last places
   of the exact number and within 7 of the pure decoder's double. Rounding a double to a float is monotone, and its result
   changes only at the midpoints between floats: among normal floats the doubles that end in 1 and 28 zero bits. Where no
   midpoint is within 16 last places, none lies between the two doubles, and they become the same float. Where one is (once
   in 16 million numbers, and never in those that were floats before they were printed), the number is refused. */
static inline int read_log_prob(Text *text, float *log_prob)
{
    static const double tens[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                  1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    uint64_t digits = 0, bits;
    int used = 0, scale = 0;
    int negative = take(text, '-');
    if (!read_whole(text, &digits, &used) || (digits == 0 && peek(text) != '.'))
        return 0; /* -0 is the integer 0, whose float has no sign */
    if (peek(text) == '.') {
        text->at++;
        if ((scale = -read_digits(text, &digits, &used)) == 0)
            return 0;
    }
    if ((peek(text) | 0x20) == 'e') {
        uint64_t exponent = 0;
        int length = 0;
        text->at++;
        int down = peek(text) == '-';
        text->at += down || peek(text) == '+';
        if (read_digits(text, &exponent, &length) == 0 || length > 3)
            return 0;
        scale += down ? -(int)exponent : (int)exponent;
    }
    if (used > 19 || scale < -66 || scale > 66)
        return 0;
    double value = (double)digits;
    for (; scale < -22; scale += 22)
        value /= 1e22;
    for (; scale > 22; scale -= 22)
        value *= 1e22;
    value = scale < 0 ? value / tens[-scale] : value * tens[scale];
    if (digits != 0) {
        memcpy(&bits, &value, sizeof bits);
        uint64_t last = bits & ((UINT64_C(1) << 29) - 1), middle = UINT64_C(1) << 28;
        if (value < 1.2e-38 || value > 3.4e38 || (middle - 16 <= last && last <= middle + 16))
            return 0; /* at the ends floats have other midpoints, or none */
    }
    *log_prob = (float)(negative ? -value : value);
    return 1;
}
