/* Tries a quantizer, float32 to E4M3, nearest and saturating, on the runs of golden vectors:
   cc -DFAULT=0 vectors.c && ./a.out roundings.bin OFFSET ROWS, both numbers from index.json.
   -DFAULT=1 sends ties away from zero, -DFAULT=2 flushes subnormals. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint8_t quantize(uint32_t x) {
    uint32_t sign = x >> 24 & 0x80, a = x & 0x7fffffff, m = (a & 0x7fffff) | 0x800000;
    int e = (int)(a >> 23) - 127, shift = e < -6 ? 14 - e : 20;
    if (a > 0x7f800000) return sign | 0x7f; /* NaN */
    if (a > 0x43e80000) return sign | 0x7e; /* above 464 */
    if (shift > 31 || (FAULT == 2 && e < -6)) return sign;
    uint32_t kept = m >> shift, rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1 || FAULT == 1));
    return sign | (e < -6 ? kept : kept + ((uint32_t)(e + 6) << 3));
}

int main(int argc, char **argv) {
    FILE *file = argc == 4 ? fopen(argv[1], "rb") : NULL;
    size_t rows = file ? strtoul(argv[3], NULL, 10) : 0;
    uint8_t *data = malloc(7 * rows + 1); /* first: 4 bytes a row; then code, other, why: 1 each */
    if (!rows || fseek(file, atol(argv[2]), SEEK_SET) || fread(data, 7, rows, file) != rows) return 2;
    uint64_t tried = 0, wrong = 0;
    for (size_t i = 0; i < rows; i++) {
        uint8_t *f = data + 4 * i, code = data[4 * rows + i], other = data[5 * rows + i];
        uint64_t first = f[0] | f[1] << 8 | f[2] << 16 | (uint64_t)f[3] << 24, end = 1ull << 32;
        if (i + 1 < rows) end = f[4] | f[5] << 8 | f[6] << 16 | (uint64_t)f[7] << 24;
        for (uint64_t x = first; x < end; x += x + 1 < end && x + 997 >= end ? end - 1 - x : 997) {
            uint8_t got = quantize((uint32_t)x), nan = (got & code & 0x7f) == 0x7f;
            tried++;
            if (got == code || got == other || nan || wrong++) continue;
            printf("%08llx gives %02x, not %02x\n", (unsigned long long)x, got, code);
        }
    }
    printf("%llu of %llu wrong\n", (unsigned long long)wrong, (unsigned long long)tried);
    return wrong > 0;
}
