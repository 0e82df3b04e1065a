/* The tokens of a whole /generate answer, cut out of its JSON as numbers: no Python object a token.

   cut(body) returns (rest, log_probs, ids): the body with null in place of output_ids and meta_info.output_token_logprobs,
   and what they said, as float32 and int32. It returns None for whatever is not the usual form; then the pure decoder, which
   knows every form and every error message, reads the same body. So this one may refuse anything, but may never differ:

   - What is cut out is checked here by the grammar of JSON. What is left is only walked over, by strings and brackets, and
     checked by the decoder of the rest. If the rest is valid JSON then the walk took it for what it is, the nulls stand
     where values stand, and the body was valid too.
   - Names are compared as bytes. One that is written with escapes, or twice, could mean another place: refused.
   - output_ids must be the very ids that the log-probs name, or null, or absent.

   Whatever only has a Scan or a Text touches no Python, so large bodies are read without the interpreter lock. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_numbers.h"

#define WITHOUT_LOCK_FROM (64 * 1024) /* getting it back may cost more than a small body takes to read */

typedef struct {
    Text text;
    int metas, cuts;
    Text cut[2]; /* in the order of the body */
    const Text *list, *triples;
    int32_t *ids;
    float *log_probs;
    size_t count, room;
} Scan;

/* --- what is cut out */

static int push(Scan *scan, int32_t id, float log_prob)
{
    if (scan->count == scan->room) {
        size_t room = scan->room ? 2 * scan->room : 256;
        int32_t *ids = PyMem_RawRealloc(scan->ids, room * sizeof *ids);
        scan->ids = ids != NULL ? ids : scan->ids;
        float *log_probs = PyMem_RawRealloc(scan->log_probs, room * sizeof *log_probs);
        scan->log_probs = log_probs != NULL ? log_probs : scan->log_probs;
        if (ids == NULL || log_probs == NULL)
            return 0; /* as good a reason as any to leave it to the pure decoder */
        scan->room = room;
    }
    scan->ids[scan->count] = id;
    scan->log_probs[scan->count++] = log_prob;
    return 1;
}

static int read_null(Text *text)
{
    if (text->end - text->at < 4 || memcmp(text->at, "null", 4) != 0)
        return 0;
    text->at += 4;
    return 1;
}

static int read_string(Text *text) /* of which nothing is kept */
{
    if (!take(text, '"'))
        return 0;
    for (unsigned char byte; (byte = (unsigned char)peek(text)) != '"'; text->at++) {
        if (byte < ' ')
            return 0;
        if (byte == '\\') {
            text->at++;
            if ((byte = (unsigned char)peek(text)) == '\0' || strchr("\"\\/bfnrt", byte) == NULL)
                return 0; /* \u too */
        }
    }
    return take(text, '"');
}

static int read_triples(Scan *scan) /* at least one */
{
    Text text = scan->text; /* in registers */
    if (!take(&text, '['))
        return 0;
    do {
        int32_t id;
        float log_prob;
        if (!take(&text, '[') || !read_log_prob(&text, &log_prob) || !take(&text, ',') || !read_id(&text, &id))
            return 0;
        if (take(&text, ',') && !(skip_space(&text) == '"' ? read_string(&text) : read_null(&text)))
            return 0;
        if (!take(&text, ']') || !push(scan, id, log_prob))
            return 0;
    } while (take(&text, ','));
    scan->text.at = text.at;
    return take(&scan->text, ']');
}

/* Whether output_ids, which may stand in front of the log-probs and so is only walked over at first, says the same. */
static int same_ids(const Scan *scan)
{
    Text text = *scan->list;
    size_t place = 0;
    int32_t id;
    if (skip_space(&text) == 'n')
        return read_null(&text) && (skip_space(&text), text.at == text.end);
    if (!take(&text, '['))
        return 0;
    do {
        if (!read_id(&text, &id) || place == scan->count || id != scan->ids[place++])
            return 0;
    } while (take(&text, ','));
    return take(&text, ']') && place == scan->count && (skip_space(&text), text.at == text.end);
}

/* --- what is left */

static int walk_string(Text *text)
{
    const char *begin = ++text->at, *quote, *escapes;
    while ((quote = memchr(text->at, '"', (size_t)(text->end - text->at))) != NULL) {
        for (escapes = quote; escapes > begin && escapes[-1] == '\\'; escapes--)
            ;
        text->at = quote + 1;
        if ((quote - escapes) % 2 == 0)
            return 1;
    }
    return 0;
}

static int walk_value(Scan *scan) /* up to the comma or the bracket behind it */
{
    Text text = scan->text;
    for (size_t depth = 0;;) {
        char byte = peek(&text);
        if (byte == '\0')
            return 0;
        if (depth == 0 && (byte == ',' || byte == ']' || byte == '}'))
            break;
        if (byte == '"') {
            if (!walk_string(&text))
                return 0;
            continue;
        }
        if (byte == '[' || byte == '{')
            depth++;
        else if (byte == ']' || byte == '}')
            depth--;
        text.at++;
    }
    scan->text.at = text.at;
    return 1;
}

static const Text *cut_out(Scan *scan, int (*read)(Scan *))
{
    Text *span = &scan->cut[scan->cuts++];
    span->at = scan->text.at;
    int usual = read(scan);
    span->end = scan->text.at;
    return usual ? span : NULL;
}

static int read_object(Scan *scan, int in_meta);

#define IS(words) (length == sizeof words - 1 && memcmp(name, words, sizeof words - 1) == 0)

static int read_value(Scan *scan, int in_meta, const char *name, size_t length)
{
    if (in_meta && IS("output_token_logprobs"))
        return scan->triples == NULL && (scan->triples = cut_out(scan, read_triples)) != NULL;
    if (!in_meta && IS("output_ids"))
        return scan->list == NULL && (scan->list = cut_out(scan, walk_value)) != NULL;
    if (!in_meta && IS("meta_info"))
        return scan->metas++ == 0 && read_object(scan, 1);
    return walk_value(scan);
}

static int read_object(Scan *scan, int in_meta) /* at least one member, as there are tokens in it */
{
    if (!take(&scan->text, '{'))
        return 0;
    do {
        if (skip_space(&scan->text) != '"')
            return 0;
        const char *name = scan->text.at + 1;
        if (!walk_string(&scan->text))
            return 0;
        size_t length = (size_t)(scan->text.at - name) - 1;
        if (memchr(name, '\\', length) != NULL || !take(&scan->text, ':') || !read_value(scan, in_meta, name, length))
            return 0;
    } while (take(&scan->text, ','));
    return take(&scan->text, '}');
}

/* --- Python */

static PyObject *rest_of(const Scan *scan, const char *begin)
{
    Py_ssize_t size = scan->text.end - begin;
    for (int i = 0; i < scan->cuts; i++)
        size += 4 - (scan->cut[i].end - scan->cut[i].at);
    PyObject *rest = PyBytes_FromStringAndSize(NULL, size);
    if (rest == NULL)
        return NULL;
    char *to = PyBytes_AsString(rest);
    for (int i = 0; i < scan->cuts; begin = scan->cut[i++].end) {
        memcpy(to, begin, (size_t)(scan->cut[i].at - begin));
        to += scan->cut[i].at - begin;
        memcpy(to, "null", 4);
        to += 4;
    }
    memcpy(to, begin, (size_t)(scan->text.end - begin));
    return rest;
}

static PyObject *cut(PyObject *Py_UNUSED(module), PyObject *body)
{
    Py_buffer buffer;
    PyObject *found = NULL;
    if (PyObject_GetBuffer(body, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    const char *begin = buffer.buf;
    Scan scan = {.text = {begin, begin + buffer.len}};
    PyThreadState *state = buffer.len >= WITHOUT_LOCK_FROM ? PyEval_SaveThread() : NULL;
    int usual = read_object(&scan, 0) && scan.triples != NULL && (scan.list == NULL || same_ids(&scan));
    if (state != NULL)
        PyEval_RestoreThread(state);
    if (usual) {
        Py_ssize_t size = 4 * (Py_ssize_t)scan.count;
        found = Py_BuildValue("Ny#y#", rest_of(&scan, begin), (char *)scan.log_probs, size, (char *)scan.ids, size);
    }
    PyMem_RawFree(scan.ids);
    PyMem_RawFree(scan.log_probs);
    PyBuffer_Release(&buffer);
    return usual ? found : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"cut", cut, METH_O, "(rest of the JSON, float32, int32) of an answer's body, or None if it is not the usual one."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_triples", .m_doc = "Cuts tokens out of answers.", .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__triples(void)
{
    return PyModuleDef_Init(&definition);
}
