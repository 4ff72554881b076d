"""``/v1/files``."""

from functools import partial

from ridgeline.core.spelling import suggestion
from ridgeline.server.body import Receive
from ridgeline.server.context import Call
from ridgeline.server.errors import bad_request
from ridgeline.server.ids import new_id
from ridgeline.server.jobs.upload import Upload
from ridgeline.server.replies import FileReply, Reply
from ridgeline.server.routes.paging import page_limit, page_of
from ridgeline.server.schemas.batches import OUTPUT_PURPOSE, PURPOSES


async def upload_file(call: Call, receive: Receive) -> Reply:
    """Store a file; once this answers, a crash does not lose it."""
    files, tenant, file_id = call.server.jobs.files, call.caller.tenant, new_id("file-")
    temporary = files.temporary(file_id)
    try:
        async with files.arriving(tenant) as count:
            upload = Upload(
                call.headers.get(b"content-type", b""),
                temporary,
                lambda file: files.writer(file, tenant, file_id),
                count,
            )
            await upload.read(receive)
            name, purpose = upload.filename or "upload", _purpose(upload.fields)
            file = await files.adopt(file_id, tenant, name, purpose, upload.size)
    finally:
        await call.server.in_thread(lambda: temporary.unlink(missing_ok=True))
    return Reply(body=file.json())


def _purpose(fields: dict[str, str]) -> str:
    """What an upload is for; ApiError 400 for a field that it may not have."""
    purpose = fields.pop("purpose", None)
    if purpose not in PURPOSES:
        raise bad_request(f"purpose must be one of {', '.join(PURPOSES)}.", "purpose")
    if unknown := next(iter(fields), None):
        if unknown.startswith("expires_after"):
            raise bad_request(f"{unknown}: files do not expire; delete them.", "expires_after")
        meant = suggestion(unknown, ("file", "purpose"))
        raise bad_request(f"{unknown}: this field is not known{meant}", unknown)
    return purpose


async def list_files(call: Call) -> Reply:
    """The caller's files."""
    order = call.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc.", "order")
    purpose, purposes = call.query.get("purpose") or None, (*PURPOSES, OUTPUT_PURPOSE)
    if purpose not in (None, *purposes):
        raise bad_request(f"purpose must be one of {', '.join(purposes)}.", "purpose")
    found, has_more = await call.server.jobs.files.list(
        call.caller.tenant,
        purpose=purpose,
        after=call.query.get("after") or None,
        limit=page_limit(call, 10_000),
        order=order,
    )
    return Reply(body=page_of([file.json() for file in found], has_more))


async def get_file(call: Call) -> Reply:
    """One of them."""
    file = await call.server.jobs.files.get(call.caller.tenant, call.path_params["file_id"])
    return Reply(body=file.json())


async def get_file_content(call: Call) -> FileReply:
    """What is in it."""
    files = call.server.jobs.files
    file = await files.get(call.caller.tenant, call.path_params["file_id"])
    return FileReply(
        open=partial(files.reader, file.tenant, file.id),
        headers=(
            (b"content-disposition", b"attachment"),
            (b"content-length", str(file.bytes).encode()),
        ),
    )


async def delete_file(call: Call) -> Reply:
    """Delete a file that no batch is reading."""
    file_id = call.path_params["file_id"]
    await call.server.jobs.files.delete(call.caller.tenant, file_id)
    return Reply(body={"id": file_id, "object": "file", "deleted": True})
